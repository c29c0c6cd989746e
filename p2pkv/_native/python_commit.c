/*
 * The commit of objects for Python: what `Catalog` writes for each of a batch, in one call. Only for
 * what is usual; the rest, and everything where there is no extension, is done in Python, which says
 * what it means (store.py, catalog.py). As in python_pieces.c these functions want the GIL.
 */
#include <pyconfig.h>
#ifndef Py_GIL_DISABLED
#define Py_LIMITED_API 0x030b0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include "index.h"
#include "native.h"

enum { NAMES = 18 };

static PyObject *name[NAMES];

enum names {
    KEY, BUCKET, OFFSET, SIZE, OPTIONS, PIN, STAMP, STATE, VERSION, EXPIRES_AT, PINS, CHECKSUM, SLOT,
    OBJECTS, VALUE_BYTES, DIGEST, DIRTY, SORTED_KEYS
};

static int make_names(void) {
    static const char *const text[NAMES] = {
        "key", "bucket", "offset", "size", "options", "pin", "stamp", "state", "version",
        "expires_at", "pins", "checksum", "slot", "objects", "value_bytes", "digest", "dirty",
        "sorted_keys"};
    for (int i = 0; i < NAMES; i++)
        if (name[i] == NULL && (name[i] = PyUnicode_InternFromString(text[i])) == NULL)
            return -1;
    return 0;
}

static int number_of(PyObject *object, enum names which, uint64_t *value) {
    PyObject *found = PyObject_GetAttr(object, name[which]);
    if (found == NULL)
        return -1;
    *value = found == Py_None ? 0 : PyLong_AsUnsignedLongLong(found);
    Py_DECREF(found);
    return *value == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* 1: the attribute is true. */
static int truth_of(PyObject *object, enum names which) {
    PyObject *found = PyObject_GetAttr(object, name[which]);
    int truth = found ? PyObject_IsTrue(found) : -1;
    Py_XDECREF(found);
    return truth;
}

static int is_same(PyObject *object, enum names which, PyObject *wanted) {
    PyObject *found = PyObject_GetAttr(object, name[which]);
    int same = found == NULL ? -1 : found == wanted;
    if (same == 0)
        same = PyObject_RichCompareBool(found, wanted, Py_EQ);
    Py_XDECREF(found);
    return same;
}

/* `object.which = value`, whose reference it takes; NULL is an error that was raised before. */
static int set(PyObject *object, enum names which, PyObject *value) {
    int failed = value == NULL || PyObject_SetAttr(object, name[which], value);
    Py_XDECREF(value);
    return failed ? -1 : 0;
}

/* An object on its way into its bucket. */
struct coming {
    PyObject *item, *key, *bucket, *objects; /* item and bucket are borrowed */
    PyObject *there;                         /* what it replaces, borrowed; or NULL */
    uint64_t number;                         /* of the bucket */
    uint64_t offset, size;
    const char *bytes;
    Py_ssize_t length;
    struct p2pkv_key sought; /* its key, if it is published */
};

struct commit {
    struct p2pkv_index *index; /* or NULL */
    char *arena;
    PyObject *buckets, *plain;
    PyObject *allocated, *committed; /* or NULL: they are new, and say already that they are committed */
    Py_ssize_t n;
    struct coming *coming;
};

/* What the objects that come, next to each other, to one bucket change there. */
struct tally {
    PyObject *bucket; /* borrowed, or NULL */
    unsigned __int128 came, went;
    long long value_bytes;
    int is_new; /* whether a key came */
};

/* -- whether all are of the usual kind: 1, 0, or -1 with an exception */

/* Without options, pins or a time to live. */
static int goes_plainly(const struct commit *c, PyObject *there) {
    int plain = is_same(there, OPTIONS, c->plain);
    if (plain <= 0)
        return plain;
    static const enum names marks[] = {PINS, PIN, EXPIRES_AT};
    for (int i = 0; i < 3; i++) {
        int set = truth_of(there, marks[i]);
        if (set)
            return set < 0 ? -1 : 0;
    }
    return 1;
}

static int look_up_bucket(const struct commit *c, struct coming *coming) {
    PyObject *number = PyObject_GetAttr(coming->item, name[BUCKET]);
    coming->bucket = number ? PyDict_GetItemWithError(c->buckets, number) : NULL;
    Py_XDECREF(number);
    if (coming->bucket == NULL)
        return PyErr_Occurred() ? -1 : 0;
    coming->objects = PyObject_GetAttr(coming->bucket, name[OBJECTS]);
    return coming->objects ? 1 : -1;
}

static int is_usual(const struct commit *c, struct coming *coming, const struct coming *before) {
    int plain = 1;
    if (c->allocated != NULL && (plain = is_same(coming->item, OPTIONS, c->plain)) > 0)
        plain = is_same(coming->item, STATE, c->allocated);
    if (plain <= 0)
        return plain;
    if (number_of(coming->item, BUCKET, &coming->number))
        return -1;
    if (before != NULL && before->number == coming->number) {
        coming->bucket = before->bucket;
        coming->objects = before->objects;
        Py_INCREF(coming->objects);
    } else if ((plain = look_up_bucket(c, coming)) <= 0) {
        return plain;
    }
    coming->key = PyObject_GetAttr(coming->item, name[KEY]);
    if (coming->key == NULL || (coming->bytes = PyBytes_AsString(coming->key)) == NULL)
        return -1;
    coming->length = PyBytes_Size(coming->key);
    if (coming->length > P2PKV_HASH_SHORT_MAX)
        return 0;
    if (number_of(coming->item, OFFSET, &coming->offset) ||
        number_of(coming->item, SIZE, &coming->size))
        return -1;
    coming->there = PyDict_GetItemWithError(coming->objects, coming->key);
    if (coming->there == NULL)
        return PyErr_Occurred() ? -1 : 1;
    return goes_plainly(c, coming->there);
}

static int have_different_keys(const struct commit *c) {
    PyObject *keys = c->n > 1 ? PySet_New(NULL) : NULL;
    if (c->n <= 1)
        return 1;
    int failed = keys == NULL;
    for (Py_ssize_t i = 0; i < c->n && !failed; i++)
        failed = PySet_Add(keys, c->coming[i].key);
    int different = failed ? -1 : PySet_Size(keys) == c->n;
    Py_XDECREF(keys);
    return different;
}

static int are_usual(struct commit *c, PyObject *items) {
    for (Py_ssize_t i = 0; i < c->n; i++) {
        c->coming[i].item = PyList_GetItem(items, i);
        int usual = c->coming[i].item ? is_usual(c, &c->coming[i], i ? &c->coming[i - 1] : NULL) : -1;
        if (usual <= 0)
            return usual;
    }
    return have_different_keys(c);
}

/* -- bringing up memory that is needed soon: it is seldom in a cache */

enum { AHEAD = 8 };

static void prefetch(const struct commit *c) {
    for (Py_ssize_t i = 0; i < c->n; i++) {
        struct coming *coming = &c->coming[i];
        __builtin_prefetch(c->arena + coming->offset - P2PKV_VALUE_HEADER, 1);
        if (c->index == NULL || coming->number >= c->index->buckets ||
            !p2pkv_key_set(&coming->sought, coming->bytes, (size_t)coming->length))
            continue;
        p2pkv_index_prefetch_tags(c->index, &coming->sought);
    }
}

static void prefetch_slot(const struct commit *c, Py_ssize_t i) {
    if (i < c->n && c->coming[i].sought.bytes != 0)
        p2pkv_index_prefetch_free(c->index, &c->coming[i].sought);
}

/* -- what is written */

static int write_header(const struct commit *c, const struct coming *coming, uint64_t version) {
    uint64_t checksum;
    if (number_of(coming->item, CHECKSUM, &checksum))
        return -1;
    const struct p2pkv_value_header header = {
        .magic = P2PKV_VALUE_MAGIC,
        .key_hash = p2pkv_hash_short(coming->bytes, (size_t)coming->length, 0),
        .size = coming->size,
        .version = version,
        .checksum = checksum,
        .state = P2PKV_VALUE_COMMITTED,
        .has_checksum = checksum != 0,
    };
    memcpy(c->arena + coming->offset - P2PKV_VALUE_HEADER, &header, sizeof(header));
    return 0;
}

static int publish(const struct commit *c, const struct coming *coming, uint64_t version) {
    if (c->index == NULL)
        return 0;
    const struct p2pkv_entry entry = {.offset = coming->offset, .size = coming->size,
                                      .version = version, .bucket = (uint32_t)coming->number};
    int64_t slot = P2PKV_SLOT_REFUSED;
    if (coming->length > P2PKV_INDEX_KEY_MAX)
        slot = P2PKV_SLOT_UNFIT;
    else if (coming->sought.bytes != 0)
        slot = p2pkv_index_publish(c->index, &coming->sought, &entry);
    p2pkv_index_recount(c->index, entry.bucket, P2PKV_SLOT_NOWHERE, slot);
    return set(coming->item, SLOT, PyLong_FromLongLong(slot));
}

static PyObject *wide(unsigned __int128 value) {
    if (value >> 64 == 0)
        return PyLong_FromUnsignedLongLong((uint64_t)value);
    unsigned char bytes[16];
    for (int i = 0; i < 16; i++, value >>= 8)
        bytes[i] = (unsigned char)value;
    return PyObject_CallMethod((PyObject *)&PyLong_Type, "from_bytes", "y#s", (char *)bytes,
                               (Py_ssize_t)16, "little");
}

/* `object.which += up - down`; takes the references. */
static int change(PyObject *object, enum names which, PyObject *up, PyObject *down) {
    PyObject *before = up && down ? PyObject_GetAttr(object, name[which]) : NULL;
    PyObject *raised = before ? PyNumber_Add(before, up) : NULL;
    PyObject *after = raised ? PyNumber_Subtract(raised, down) : NULL;
    Py_XDECREF(before);
    Py_XDECREF(raised);
    Py_XDECREF(up);
    Py_XDECREF(down);
    return set(object, which, after);
}

/* Adds to the bucket's figures what was tallied. */
static int settle(struct tally *tally) {
    PyObject *bucket = tally->bucket;
    if (bucket == NULL)
        return 0;
    if (tally->is_new) {
        Py_INCREF(Py_None);
        if (set(bucket, SORTED_KEYS, Py_None))
            return -1;
    }
    return change(bucket, VALUE_BYTES, PyLong_FromLongLong(tally->value_bytes), PyLong_FromLong(0)) ||
           change(bucket, DIGEST, wide(tally->came), wide(tally->went));
}

static int count(struct tally *tally, const struct coming *coming, uint64_t stamp) {
    if (tally->bucket != coming->bucket) {
        if (settle(tally))
            return -1;
        *tally = (struct tally){.bucket = coming->bucket};
    }
    uint64_t old_size = 0, old_stamp;
    if (coming->there == NULL) {
        tally->is_new = 1;
    } else if (number_of(coming->there, SIZE, &old_size) ||
               number_of(coming->there, STAMP, &old_stamp)) {
        return -1;
    } else {
        tally->went += p2pkv_hash_short(coming->bytes, (size_t)coming->length, old_stamp);
    }
    tally->came += p2pkv_hash_short(coming->bytes, (size_t)coming->length, stamp);
    tally->value_bytes += (long long)(coming->size - old_size);
    return 0;
}

static int note_change(const struct coming *coming) {
    PyObject *dirty = PyObject_GetAttr(coming->bucket, name[DIRTY]);
    int failed = dirty == NULL;
    if (!failed && dirty != Py_None)
        failed = PyDict_SetItem(dirty, coming->key, Py_None);
    Py_XDECREF(dirty);
    return failed ? -1 : 0;
}

/* What names the write; it may have been given one before. */
static int stamp_of(const struct commit *c, PyObject *item, uint64_t version, uint64_t *stamp) {
    *stamp = version;
    if (c->allocated == NULL)
        return 0;
    PyObject *number = PyLong_FromUnsignedLongLong(version);
    int failed = number == NULL || number_of(item, STAMP, stamp) ||
                 PyObject_SetAttr(item, name[VERSION], number) ||
                 (!*stamp && PyObject_SetAttr(item, name[STAMP], number)) ||
                 PyObject_SetAttr(item, name[STATE], c->committed);
    Py_XDECREF(number);
    *stamp = *stamp ? *stamp : version;
    return failed ? -1 : 0;
}

static int show(const struct commit *c, const struct coming *coming, uint64_t version,
                struct tally *tally) {
    uint64_t stamp;
    if (stamp_of(c, coming->item, version, &stamp) || count(tally, coming, stamp) ||
        note_change(coming) || write_header(c, coming, version) ||
        PyDict_SetItem(coming->objects, coming->key, coming->item))
        return -1;
    return publish(c, coming, version);
}

static int show_all(const struct commit *c, uint64_t version) {
    struct tally tally = {0};
    prefetch(c);
    for (Py_ssize_t i = 0; i < AHEAD; i++)
        prefetch_slot(c, i);
    for (Py_ssize_t i = 0; i < c->n; i++) {
        prefetch_slot(c, i + AHEAD);
        if (show(c, &c->coming[i], version + 1 + (uint64_t)i, &tally))
            return -1;
    }
    return settle(&tally);
}

/* The objects that were replaced, as a list. They are kept by it alone. */
static PyObject *replaced(const struct commit *c) {
    PyObject *gone = PyList_New(0);
    for (Py_ssize_t i = 0; i < c->n && gone != NULL; i++)
        if (c->coming[i].there != NULL && PyList_Append(gone, c->coming[i].there))
            Py_CLEAR(gone);
    return gone;
}

/* Makes objects visible, whose versions follow `version`; a list of those that they replace, or None,
 * and nothing was done: not all are of the usual kind. `states`: ALLOCATED and COMMITTED, or nothing
 * if the objects are new, without options, and say themselves that they are committed. */
static PyObject *commit(size_t index, size_t arena, PyObject *items, PyObject *buckets,
                        PyObject *plain, PyObject *states, unsigned long long version) {
    struct commit c = {.index = (void *)index, .arena = (void *)arena, .buckets = buckets,
                       .plain = plain, .n = PyList_Size(items)};
    if (PyTuple_Size(states) > 0) {
        c.allocated = PyTuple_GetItem(states, 0);
        c.committed = PyTuple_GetItem(states, 1);
    }
    if (PyErr_Occurred() || make_names())
        return NULL;
    c.coming = PyMem_Calloc((size_t)c.n + 1, sizeof(*c.coming));
    if (c.coming == NULL)
        return PyErr_NoMemory();
    PyObject *result = NULL;
    int usual = are_usual(&c, items);
    if (usual == 0) {
        Py_INCREF(Py_None);
        result = Py_None;
    } else if (usual > 0) {
        result = replaced(&c);
        if (result != NULL && show_all(&c, version)) {
            Py_CLEAR(result);
            if (c.index != NULL) /* what is not in it may not be counted */
                atomic_store_explicit(&c.index->broken, 1, memory_order_seq_cst);
        }
    }
    for (Py_ssize_t i = 0; i < c.n; i++) {
        Py_XDECREF(c.coming[i].key);
        Py_XDECREF(c.coming[i].objects);
    }
    PyMem_Free(c.coming);
    return result;
}

uintptr_t p2pkv_commit_function(void) {
    return (uintptr_t)commit;
}
