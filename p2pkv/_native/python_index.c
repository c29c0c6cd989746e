/*
 * The published index for Python: whole batches of keys and objects in one call. As in
 * python_pieces.c these functions want the GIL; large copies are made without it.
 */
#include <pyconfig.h>
#ifndef Py_GIL_DISABLED
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>

#include <time.h>

#include "index.h"
#include "native.h"

enum {
    CHUNK = 16,
    OFF_GIL_MIN = 256 << 10,
    GIL_WAIT_NS = 1000000,
    GIL_KEPT_NS = 4500000, /* sys.getswitchinterval() is 5 ms, less some time to begin */
    TAIL_MIN = 4 << 20
};

/* -- writing: objects of the store, by their attributes */

enum { REFUSED = P2PKV_SLOT_REFUSED, NOWHERE = P2PKV_SLOT_NOWHERE, UNFIT = P2PKV_SLOT_UNFIT };

struct names {
    PyObject *key, *bucket, *offset, *size, *version, *expires_at, *slot, *options, *write_once;
};

static const struct names *names(void) {
    static struct names n;
    if (n.write_once == NULL) {
        n.key = PyUnicode_InternFromString("key");
        n.bucket = PyUnicode_InternFromString("bucket");
        n.offset = PyUnicode_InternFromString("offset");
        n.size = PyUnicode_InternFromString("size");
        n.version = PyUnicode_InternFromString("version");
        n.expires_at = PyUnicode_InternFromString("expires_at");
        n.slot = PyUnicode_InternFromString("slot");
        n.options = PyUnicode_InternFromString("options");
        n.write_once = PyUnicode_InternFromString("write_once");
    }
    return n.write_once == NULL ? NULL : &n;
}

static int number_of(PyObject *object, PyObject *name, uint64_t *value) {
    PyObject *found = PyObject_GetAttr(object, name);
    if (found == NULL)
        return -1;
    *value = PyLong_AsUnsignedLongLong(found);
    Py_DECREF(found);
    return *value == (uint64_t)-1 && PyErr_Occurred() ? -1 : 0;
}

static int slot_of(PyObject *object, const struct names *n, long long *slot) {
    PyObject *found = PyObject_GetAttr(object, n->slot);
    if (found == NULL)
        return -1;
    *slot = PyLong_AsLongLong(found);
    Py_DECREF(found);
    return *slot == -1 && PyErr_Occurred() ? -1 : 0;
}

static int set_slot(PyObject *object, const struct names *n, long long slot) {
    PyObject *value = PyLong_FromLongLong(slot);
    int failed = value == NULL || PyObject_SetAttr(object, n->slot, value);
    Py_XDECREF(value);
    return failed ? -1 : 0;
}

static int is_write_once(PyObject *object, const struct names *n, uint32_t *flags) {
    PyObject *options = PyObject_GetAttr(object, n->options);
    PyObject *once = options ? PyObject_GetAttr(options, n->write_once) : NULL;
    int truth = once ? PyObject_IsTrue(once) : -1;
    Py_XDECREF(options);
    Py_XDECREF(once);
    *flags = truth > 0 ? P2PKV_FLAG_WRITE_ONCE : 0;
    return truth < 0 ? -1 : 0;
}

static int entry_of(PyObject *object, const struct names *n, struct p2pkv_entry *entry) {
    uint64_t bucket;
    if (number_of(object, n->bucket, &bucket) || number_of(object, n->offset, &entry->offset) ||
        number_of(object, n->size, &entry->size) ||
        number_of(object, n->version, &entry->version) ||
        number_of(object, n->expires_at, &entry->expires_at) ||
        is_write_once(object, n, &entry->flags))
        return -1;
    entry->bucket = (uint32_t)bucket;
    return 0;
}

/* The bytes of a key, bytes or str; 0: not one that is published. An error is swallowed: whoever
 * checks keys says what is wrong with it. */
static int key_of(PyObject *object, struct p2pkv_key *key) {
    const char *bytes = NULL;
    Py_ssize_t length = 0;
    if (PyUnicode_Check(object))
        bytes = PyUnicode_AsUTF8AndSize(object, &length);
    else if (PyBytes_Check(object)) {
        bytes = PyBytes_AsString(object);
        length = PyBytes_Size(object);
    }
    if (bytes == NULL) {
        PyErr_Clear();
        return 0;
    }
    return p2pkv_key_set(key, bytes, (size_t)length);
}

static int publish_one(struct p2pkv_index *index, PyObject *object, const struct names *n) {
    struct p2pkv_entry entry = {0};
    struct p2pkv_key key;
    long long before;
    if (entry_of(object, n, &entry) || slot_of(object, n, &before))
        return -1;
    PyObject *name = PyObject_GetAttr(object, n->key);
    if (name == NULL)
        return -1;
    int64_t slot = REFUSED;
    if (!key_of(name, &key))
        slot = UNFIT;
    else if (entry.bucket < index->buckets)
        slot = p2pkv_index_publish(index, &key, &entry);
    Py_DECREF(name);
    if (slot == before)
        return 0;
    p2pkv_index_recount(index, entry.bucket, before, slot);
    return set_slot(object, n, slot);
}

static int withdraw_one(struct p2pkv_index *index, PyObject *object, const struct names *n) {
    long long slot;
    uint64_t version, bucket;
    if (slot_of(object, n, &slot))
        return -1;
    if (slot == NOWHERE)
        return 0;
    if (slot >= 0) {
        if (number_of(object, n->version, &version))
            return -1;
        p2pkv_index_withdraw(index, (uint64_t)slot, version);
    } else {
        if (number_of(object, n->bucket, &bucket))
            return -1;
        p2pkv_index_recount(index, (uint32_t)bucket, slot, NOWHERE);
    }
    return set_slot(object, n, NOWHERE);
}

typedef int (*step)(struct p2pkv_index *, PyObject *, const struct names *);

static PyObject *for_each(size_t memory, PyObject *objects, step one) {
    const struct names *n = names();
    PyObject *iterator = n ? PyObject_GetIter(objects) : NULL, *object;
    if (iterator == NULL)
        return NULL;
    while ((object = PyIter_Next(iterator)) != NULL) {
        int failed = one((void *)memory, object, n);
        Py_DECREF(object);
        if (failed)
            break;
    }
    Py_DECREF(iterator);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

/* Where this fails, what is not in the index is not counted: from then on it tells of hits only. */
static PyObject *publish(size_t memory, PyObject *objects) {
    struct p2pkv_index *index = (void *)memory;
    PyObject *done = for_each(memory, objects, publish_one);
    if (done == NULL)
        atomic_store_explicit(&index->broken, 1, memory_order_seq_cst);
    return done;
}

static PyObject *withdraw(size_t memory, PyObject *objects) {
    return for_each(memory, objects, withdraw_one);
}

/* The objects of which a thread of this process holds the value, as a list. */
static PyObject *held(size_t memory, PyObject *objects) {
    const struct names *n = names();
    PyObject *result = n ? PyList_New(0) : NULL;
    PyObject *iterator = result ? PyObject_GetIter(objects) : NULL, *object;
    if (iterator == NULL) {
        Py_XDECREF(result);
        return NULL;
    }
    while ((object = PyIter_Next(iterator)) != NULL) {
        uint64_t offset;
        int failed = number_of(object, n->offset, &offset);
        if (!failed && p2pkv_index_held((void *)memory, offset))
            failed = PyList_Append(result, object);
        Py_DECREF(object);
        if (failed)
            break;
    }
    Py_DECREF(iterator);
    if (PyErr_Occurred()) {
        Py_DECREF(result);
        return NULL;
    }
    return result;
}

/* Whether a reader has used what stands in the slot since this was asked last. */
static PyObject *take_use(size_t memory, long long at) {
    struct p2pkv_index *index = (void *)memory;
    if (at < 0 || (uint64_t)at >= index->groups * P2PKV_INDEX_WAYS)
        Py_RETURN_FALSE;
    _Atomic uint32_t *used = &p2pkv_slots(index)[at].used;
    if (!atomic_load_explicit(used, memory_order_relaxed))
        Py_RETURN_FALSE;
    atomic_store_explicit(used, 0, memory_order_relaxed);
    Py_RETURN_TRUE;
}

static unsigned long long figure(_Atomic uint64_t *counted) {
    return atomic_load_explicit(counted, memory_order_relaxed);
}

/* Figures of the index, in the order of index.py's Figures. */
static PyObject *figures(size_t memory) {
    struct p2pkv_index *index = (void *)memory;
    return Py_BuildValue("KKKKKKKK", (unsigned long long)(index->groups * P2PKV_INDEX_WAYS),
                         figure(&index->published), figure(&index->refused), figure(&index->hits),
                         figure(&index->misses), figure(&index->present), figure(&index->absent),
                         figure(&index->torn));
}

/* -- reading: the indexes of all nodes of the host */

struct map {
    struct p2pkv_index *index;
    char *arena;
    uint64_t arena_bytes;
};

struct maps {
    size_t count;
    const struct map *map;
};

struct found {
    struct p2pkv_entry entry;
    const struct map *map; /* whose word it is; NULL: the owner is to be asked */
    int there;             /* 0: the map's node serves the bucket, and has no such key */
};

static int maps_of(PyObject *packed, struct maps *maps) {
    Py_ssize_t bytes = PyBytes_Size(packed);
    if (bytes < 0)
        return -1;
    maps->count = (size_t)bytes / sizeof(struct map);
    maps->map = (const void *)PyBytes_AsString(packed);
    return 0;
}

/* A node that gives its bucket away still has the key where the gate is closed already. */
static void find_one(const struct maps *maps, const struct p2pkv_key *key, struct found *found) {
    for (size_t m = 0; m < maps->count; m++)
        if (p2pkv_index_find(maps->map[m].index, key, &found->entry) > 0 &&
            found->entry.serve_until) {
            found->map = &maps->map[m];
            found->there = 1;
            return;
        }
    for (size_t m = 0; m < maps->count; m++) {
        struct p2pkv_index *index = maps->map[m].index;
        if (p2pkv_index_absent(index, key, &found->entry) &&
            (m + 1 == maps->count || p2pkv_entry_fresh(&found->entry, p2pkv_index_now(index)))) {
            found->map = &maps->map[m]; /* and not one that served the bucket before the others */
            return;
        }
    }
}

/* What stands where, for `n` keys from `first` on. */
static void find_chunk(const struct maps *maps, PyObject *keys, Py_ssize_t first, Py_ssize_t n,
                       struct found *found) {
    struct p2pkv_key chunk[CHUNK];
    for (Py_ssize_t i = 0; i < n; i++) {
        found[i].map = NULL;
        found[i].there = 0;
        if (!key_of(PyList_GetItem(keys, first + i), &chunk[i]))
            chunk[i].bytes = 0;
        else if (maps->count)
            p2pkv_index_prefetch(maps->map[0].index, &chunk[i]);
    }
    for (Py_ssize_t i = 0; i < n; i++)
        if (chunk[i].bytes)
            find_one(maps, &chunk[i], &found[i]);
}

/* Drops what does not count by clocks that are read now. */
static void keep_fresh(const struct maps *maps, struct found *found, Py_ssize_t n) {
    for (size_t m = 0; m < maps->count; m++) {
        const struct map *map = &maps->map[m];
        uint64_t now = p2pkv_index_now(map->index);
        for (Py_ssize_t i = 0; i < n; i++) {
            if (found[i].map != map)
                continue;
            const struct p2pkv_entry *entry = &found[i].entry;
            int within = !found[i].there || (entry->offset >= P2PKV_VALUE_HEADER &&
                                             entry->offset <= map->arena_bytes &&
                                             entry->size <= map->arena_bytes - entry->offset);
            if (!within || !p2pkv_entry_fresh(entry, now))
                found[i].map = NULL;
        }
    }
}

static void count(_Atomic uint64_t *counted, uint64_t n) {
    if (n)
        atomic_fetch_add_explicit(counted, n, memory_order_relaxed);
}

/* What was answered, by whose word: values, or whether keys are there. */
static void count_answers(const struct maps *maps, const struct found *found, Py_ssize_t n,
                          int values) {
    for (size_t m = 0; m < maps->count; m++) {
        struct p2pkv_index *index = maps->map[m].index;
        uint64_t of[2] = {0, 0};
        for (Py_ssize_t i = 0; i < n; i++)
            if (found[i].map == &maps->map[m])
                of[found[i].there]++;
        count(values ? &index->misses : &index->absent, of[0]);
        count(values ? &index->hits : &index->present, of[1]);
    }
}

enum { ABSENT, THERE, ASK }; /* as in routing.py */

/* A byte for each key of a list. */
static PyObject *exists(PyObject *packed, PyObject *keys) {
    struct maps maps;
    struct found found[CHUNK];
    Py_ssize_t n = PyList_Size(keys);
    if (n < 0 || maps_of(packed, &maps))
        return NULL;
    PyObject *result = PyBytes_FromStringAndSize(NULL, n);
    if (result == NULL)
        return NULL;
    char *flags = PyBytes_AsString(result);
    for (Py_ssize_t first = 0; first < n; first += CHUNK) {
        Py_ssize_t some = n - first < CHUNK ? n - first : CHUNK;
        find_chunk(&maps, keys, first, some, found);
        keep_fresh(&maps, found, some);
        count_answers(&maps, found, some, 0);
        for (Py_ssize_t i = 0; i < some; i++)
            flags[first + i] = found[i].map == NULL ? ASK : found[i].there ? THERE : ABSENT;
    }
    return result;
}

/* A batch of values on their way from arenas to memory of the caller. */
struct reading {
    struct maps maps;
    Py_ssize_t n;
    struct found *found;
    struct iovec *to, *from;
    uint64_t bytes;
    size_t count;
    int threads;
    uint64_t streaming_min;
};

static void reading_free(struct reading *r) {
    PyMem_Free(r->found);
    PyMem_Free(r->to);
}

static int reading_begin(struct reading *r, PyObject *packed, PyObject *keys) {
    *r = (struct reading){.n = PyList_Size(keys)};
    if (r->n < 0 || maps_of(packed, &r->maps))
        return -1;
    size_t n = (size_t)r->n;
    r->found = PyMem_Calloc(n + 1, sizeof(*r->found));
    r->to = PyMem_Calloc(n + 1, 2 * sizeof(*r->to));
    if (r->found == NULL || r->to == NULL) {
        reading_free(r);
        PyErr_NoMemory();
        return -1;
    }
    r->from = r->to + n;
    for (Py_ssize_t first = 0; first < r->n; first += CHUNK)
        find_chunk(&r->maps, keys, first, r->n - first < CHUNK ? r->n - first : CHUNK,
                   r->found + first);
    keep_fresh(&r->maps, r->found, r->n);
    return 0;
}

static void reading_add(struct reading *r, const struct found *found, void *target) {
    size_t size = (size_t)found->entry.size;
    r->to[r->count] = (struct iovec){target, size};
    r->from[r->count] = (struct iovec){found->map->arena + found->entry.offset, size};
    r->bytes += size;
    r->count++;
}

/* A run of the values, `first` up to `last`. */
struct part {
    const struct reading *r;
    size_t first, last;
    uint64_t bytes;
    _Atomic int done;
};

/* How long a MiB took, of the last copy that was large. */
static _Atomic int64_t ns_per_mib = 100000;

static int64_t clock_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000ll + time.tv_nsec;
}

static void copy_part(struct part *part) {
    const struct reading *r = part->r;
    int64_t start = clock_ns();
    size_t count = part->last - part->first;
    const struct p2pkv_pieces to = {count, part->bytes, NULL, r->to + part->first};
    const struct p2pkv_pieces from = {count, part->bytes, NULL, r->from + part->first};
    p2pkv_copy((uintptr_t)&to, (uintptr_t)&from, r->threads, r->streaming_min);
    if (part->bytes >= TAIL_MIN)
        atomic_store(&ns_per_mib, 1 + (clock_ns() - start) / (int64_t)(part->bytes >> 20));
}

static void *copy_on_thread(void *part) {
    copy_part(part);
    atomic_store(&((struct part *)part)->done, 1);
    return NULL;
}

/* Whether another thread had the GIL, and did not give it away, when it was last wanted back. */
static _Atomic int gil_is_busy;

static void take_gil(PyThreadState *state) {
    int64_t start = clock_ns();
    PyEval_RestoreThread(state);
    atomic_store(&gil_is_busy, clock_ns() - start > GIL_WAIT_NS);
}

/* The values at the end that are copied in about the time for which a busy thread keeps the GIL. */
static struct part tail_of(const struct reading *r) {
    struct part tail = {r, r->count, r->count, 0, 0};
    uint64_t bytes_max = (uint64_t)(GIL_KEPT_NS / atomic_load(&ns_per_mib)) << 20;
    while (tail.first > 0) {
        size_t size = r->to[tail.first - 1].iov_len;
        if (tail.bytes && tail.bytes + size > bytes_max)
            break;
        tail.bytes += size;
        tail.first--;
    }
    return tail;
}

/* Asks for the GIL while the end is still being copied: a busy thread gives it away some 5 ms after
 * it was asked to. Called without the GIL, returns with it. */
static void copy_and_take_gil(struct reading *r, PyThreadState *state) {
    struct part tail = tail_of(r), head = {r, 0, tail.first, r->bytes - tail.bytes, 0};
    pthread_t thread;
    copy_part(&head);
    if (p2pkv_thread(&thread, NULL, copy_on_thread, &tail)) {
        copy_part(&tail);
        take_gil(state);
        return;
    }
    take_gil(state);
    if (!atomic_load(&tail.done)) {
        state = PyEval_SaveThread();
        pthread_join(thread, NULL);
        PyEval_RestoreThread(state);
    } else {
        pthread_join(thread, NULL);
    }
}

static void reading_copy(struct reading *r) {
    struct part all = {r, 0, r->count, r->bytes, 0};
    if (r->bytes < OFF_GIL_MIN) {
        copy_part(&all);
        return;
    }
    PyThreadState *state = PyEval_SaveThread();
    if (r->bytes >= TAIL_MIN && atomic_load(&gil_is_busy)) {
        copy_and_take_gil(r, state);
    } else {
        copy_part(&all);
        take_gil(state);
    }
}

/* Copies, then drops what was changed meanwhile. Without the GIL where that pays. */
static void reading_run(struct reading *r) {
    reading_copy(r);
    for (Py_ssize_t i = 0; i < r->n; i++) {
        const struct map *map = r->found[i].map;
        if (map == NULL || !r->found[i].there)
            continue;
        if (p2pkv_entry_unchanged(&r->found[i].entry, map->arena)) {
            p2pkv_index_use(map->index, &r->found[i].entry);
        } else {
            count(&map->index->torn, 1);
            r->found[i].map = NULL;
        }
    }
    count_answers(&r->maps, r->found, r->n, 1);
}

/* (`results`, the numbers of the keys whose owner is to be asked), or NULL. Takes `results`. */
static PyObject *with_asks(const struct reading *r, PyObject *results) {
    PyObject *asks = results ? PyList_New(0) : NULL, *both = NULL;
    int failed = asks == NULL;
    for (Py_ssize_t i = 0; i < r->n && !failed; i++) {
        if (r->found[i].map != NULL)
            continue;
        PyObject *number = PyLong_FromSsize_t(i);
        failed = number == NULL || PyList_Append(asks, number);
        Py_XDECREF(number);
    }
    if (!failed)
        both = Py_BuildValue("OO", results, asks);
    Py_XDECREF(results);
    Py_XDECREF(asks);
    return both;
}

/* The size of each value that was copied to its target, None: it is not there; and whose owners are to
 * be asked, also for what is wrong with the target. */
static PyObject *get_into(PyObject *packed, PyObject *keys, PyObject *targets,
                          unsigned long long bytes_max, int threads,
                          unsigned long long streaming_min) {
    struct reading r;
    if (reading_begin(&r, packed, keys))
        return NULL;
    PyObject *result = NULL;
    Py_buffer *buffers = PyMem_Calloc((size_t)r.n + 1, sizeof(*buffers));
    if (buffers == NULL || PyList_Size(targets) != r.n) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "targets: not as many as keys");
        goto end;
    }
    for (Py_ssize_t i = 0; i < r.n; i++) {
        struct found *found = &r.found[i];
        if (found->map == NULL || (found->there && found->entry.size > bytes_max - r.bytes)) {
            found->map = NULL;
            continue;
        }
        PyObject *target = PyList_GetItem(targets, i);
        Py_XINCREF(target); /* its buffer may be made by code that changes the list */
        if (target == NULL || PyObject_GetBuffer(target, &buffers[i], PyBUF_WRITABLE)) {
            PyErr_Clear();
            found->map = NULL;
        } else if (found->there && (uint64_t)buffers[i].len < found->entry.size) {
            found->map = NULL;
        } else if (found->there) {
            reading_add(&r, found, buffers[i].buf);
        }
        Py_XDECREF(target);
    }
    r.threads = threads;
    r.streaming_min = streaming_min;
    reading_run(&r);
    result = PyList_New(r.n);
    for (Py_ssize_t i = 0; i < r.n && result != NULL; i++) {
        PyObject *size;
        if (r.found[i].map != NULL && r.found[i].there) {
            size = PyLong_FromUnsignedLongLong(r.found[i].entry.size);
        } else {
            Py_INCREF(Py_None);
            size = Py_None;
        }
        if (size == NULL || PyList_SetItem(result, i, size))
            Py_CLEAR(result);
    }
    result = with_asks(&r, result);
end:
    for (Py_ssize_t i = 0; buffers != NULL && i < r.n; i++)
        PyBuffer_Release(&buffers[i]); /* does nothing for one that was not taken */
    PyMem_Free(buffers);
    reading_free(&r);
    return result;
}

/* The values as bytes, None: it is not there; and whose owners are to be asked. */
static PyObject *get(PyObject *packed, PyObject *keys, unsigned long long bytes_max, int threads,
                     unsigned long long streaming_min) {
    struct reading r;
    if (reading_begin(&r, packed, keys))
        return NULL;
    PyObject *result = PyList_New(r.n);
    for (Py_ssize_t i = 0; i < r.n && result != NULL; i++) {
        struct found *found = &r.found[i];
        PyObject *value = Py_None;
        if (found->map != NULL && found->there && found->entry.size <= bytes_max - r.bytes) {
            value = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)found->entry.size);
            if (value != NULL)
                reading_add(&r, found, PyBytes_AsString(value));
        } else {
            if (found->there)
                found->map = NULL;
            Py_INCREF(value);
        }
        if (value == NULL || PyList_SetItem(result, i, value))
            Py_CLEAR(result);
    }
    r.threads = threads;
    r.streaming_min = streaming_min;
    if (result != NULL)
        reading_run(&r);
    for (Py_ssize_t i = 0; i < r.n && result != NULL; i++)
        if (r.found[i].map == NULL) {
            Py_INCREF(Py_None);
            if (PyList_SetItem(result, i, Py_None))
                Py_CLEAR(result);
        }
    result = with_asks(&r, result);
    reading_free(&r);
    return result;
}

/* For each key (number of its map, offset, size, version) of its value, or None: ask the owner. What
 * is copied from there counts if the value's header is of this version still afterwards. */
static PyObject *places(PyObject *packed, PyObject *keys) {
    struct maps maps;
    struct found found[CHUNK];
    Py_ssize_t n = PyList_Size(keys);
    if (n < 0 || maps_of(packed, &maps))
        return NULL;
    PyObject *result = PyList_New(n);
    for (Py_ssize_t first = 0; first < n && result != NULL; first += CHUNK) {
        Py_ssize_t some = n - first < CHUNK ? n - first : CHUNK;
        find_chunk(&maps, keys, first, some, found);
        keep_fresh(&maps, found, some);
        for (Py_ssize_t i = 0; i < some; i++)
            if (!found[i].there)
                found[i].map = NULL;
        count_answers(&maps, found, some, 1);
        for (Py_ssize_t i = 0; i < some && result != NULL; i++) {
            const struct map *map = found[i].map;
            const struct p2pkv_entry *entry = &found[i].entry;
            PyObject *place = Py_None;
            if (map == NULL) {
                Py_INCREF(place);
            } else {
                p2pkv_index_use(map->index, entry);
                place = Py_BuildValue("nKKK", (Py_ssize_t)(map - maps.map),
                                      (unsigned long long)entry->offset,
                                      (unsigned long long)entry->size,
                                      (unsigned long long)entry->version);
            }
            if (place == NULL || PyList_SetItem(result, first + i, place))
                Py_CLEAR(result);
        }
    }
    return result;
}

/* The bucket of each key of a list of bytes. */
static PyObject *buckets(PyObject *keys, unsigned long long count) {
    Py_ssize_t n = PyList_Size(keys);
    PyObject *result = n < 0 ? NULL : PyList_New(n);
    for (Py_ssize_t i = 0; i < n && result != NULL; i++) {
        char *bytes;
        Py_ssize_t length;
        PyObject *bucket = NULL;
        if (!PyBytes_AsStringAndSize(PyList_GetItem(keys, i), &bytes, &length))
            bucket = PyLong_FromUnsignedLong(
                p2pkv_bucket_of(bytes, (size_t)length, (uint32_t)count));
        if (bucket == NULL || PyList_SetItem(result, i, bucket))
            Py_CLEAR(result);
    }
    return result;
}

uintptr_t p2pkv_index_function(int which) {
    switch (which) {
    case 0:
        return (uintptr_t)publish;
    case 1:
        return (uintptr_t)withdraw;
    case 2:
        return (uintptr_t)held;
    case 3:
        return (uintptr_t)take_use;
    case 4:
        return (uintptr_t)figures;
    case 5:
        return (uintptr_t)exists;
    case 6:
        return (uintptr_t)get_into;
    case 7:
        return (uintptr_t)get;
    case 8:
        return (uintptr_t)places;
    case 9:
        return (uintptr_t)buckets;
    case 10:
        return p2pkv_commit_function();
    default:
        return 0;
    }
}
