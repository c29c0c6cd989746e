/*
 * The client's end of a read connection: a whole request and its reply in one call, which gives the
 * GIL away while it waits. Python reaches these by address, as those of python_pieces.c.
 */
#include <pyconfig.h>
#ifndef Py_GIL_DISABLED
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>

#include "native.h"
#include "read_protocol.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>

enum { SPIN_RETRY = 64 };

/* The pieces of one call that are on the heap when there are many. */
struct request {
    uint8_t *bytes;
    size_t length;
};

/* -- asking */

static Py_ssize_t key_bytes(PyObject *keys, Py_ssize_t count) {
    Py_ssize_t total = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t length = PyBytes_Size(PyList_GetItem(keys, i));
        if (length < 0)
            return -1;
        if (length < 1 || length > READ_KEY_MAX) {
            PyErr_Format(PyExc_ValueError, "keys[%zd]: %zd bytes", i, length);
            return -1;
        }
        total += length;
    }
    return total;
}

static int encode(p2pkv_read_link *link, int kind, PyObject *keys, struct request *request) {
    Py_ssize_t count = PyList_Size(keys);
    Py_ssize_t total = count < 0 ? -1 : key_bytes(keys, count);
    if (total < 0)
        return -1;
    size_t body = 2 * (size_t)count + (size_t)total;
    if (count < 1 || count > READ_KEYS_MAX || body > READ_BODY_MAX) {
        PyErr_Format(PyExc_ValueError, "keys: %zd of %zd bytes", count, total);
        return -1;
    }
    request->length = READ_REQUEST + body;
    request->bytes = request->length <= sizeof link->buffer ? link->buffer : malloc(request->length);
    if (request->bytes == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    uint8_t *head = request->bytes, *lengths = head + READ_REQUEST, *at = lengths + 2 * count;
    link->id++, link->kind = (uint32_t)kind, link->count = (uint32_t)count;
    put_le(head, body, 4);
    head[4] = READ_VERSION, head[5] = (uint8_t)kind, head[6] = head[7] = 0;
    put_le(head + 8, (uint64_t)count, 4);
    put_le(head + 12, link->id, 4);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *key = PyList_GetItem(keys, i);
        size_t length = (size_t)PyBytes_Size(key);
        put_le(lengths + 2 * i, length, 2);
        memcpy(at, PyBytes_AsString(key), length);
        at += length;
    }
    return 0;
}

/* Signals are seen to with the GIL; -1 when their handler raised. */
static int see_to_signals(PyThreadState **state) {
    PyEval_RestoreThread(*state);
    int raised = PyErr_CheckSignals();
    *state = PyEval_SaveThread();
    return raised;
}

/* 0, an error as `p2pkv_send_all` has them, or -1: a signal's handler raised. */
static int send_request(p2pkv_read_link *link, const struct request *request, int64_t deadline_ns,
                        PyThreadState **state) {
    struct iovec iov = {request->bytes, request->length};
    struct p2pkv_pieces pieces = {.count = 1, .bytes = request->length, .iov = &iov};
    p2pkv_transfer sent = {0, EINTR};
    while (sent.error == EINTR) {
        sent = p2pkv_send_all(link->fd, (uintptr_t)&pieces, sent.bytes, deadline_ns, 0);
        if (sent.error == EINTR && see_to_signals(state))
            return -1;
    }
    return sent.error;
}

static PyObject *read_ask(size_t address, int kind, PyObject *keys, int64_t deadline_ns) {
    p2pkv_read_link *link = (void *)address;
    struct request request;
    if (encode(link, kind, keys, &request))
        return NULL;
    PyThreadState *state = PyEval_SaveThread();
    int error = send_request(link, &request, deadline_ns, &state);
    PyEval_RestoreThread(state);
    if (request.bytes != link->buffer)
        free(request.bytes);
    link->start = link->end = 0;
    return error < 0 ? NULL : PyLong_FromLong(error);
}

/* -- the reply */

/* How long to poll before sleeping: only as long as that pays, and now and then to see if it does. */
static int64_t spin_of(p2pkv_read_link *link) {
    link->calls++;
    return link->spin_pays || link->calls % SPIN_RETRY == 0 ? link->spin_ns : 0;
}

/* Has `need` bytes in the buffer, and whatever else came with them. */
static int receive_ahead(p2pkv_read_link *link, size_t need, int64_t deadline_ns,
                         PyThreadState **state) {
    int64_t spin_ns = spin_of(link);
    while (link->end < need) {
        ssize_t n = recv(link->fd, link->buffer + link->end, sizeof link->buffer - link->end,
                         MSG_DONTWAIT);
        if (n == 0)
            return P2PKV_CLOSED;
        if (n > 0) {
            link->end += (uint32_t)n;
            continue;
        }
        if (errno != EAGAIN && errno != EINTR)
            return errno;
        int slept = 0;
        int error = p2pkv_wait_readable(link->fd, deadline_ns, spin_ns, &slept);
        if (spin_ns)
            link->spin_pays = !slept;
        spin_ns = 0;
        if (error == EINTR ? see_to_signals(state) : error)
            return error == EINTR ? -1 : error;
    }
    return 0;
}

/* Fills the pieces: from what was read ahead first, then from the socket. */
static int receive_into(p2pkv_read_link *link, const struct p2pkv_pieces *pieces,
                        int64_t deadline_ns, PyThreadState **state) {
    struct p2pkv_cursor at = {0, 0};
    uint64_t done = 0;
    p2pkv_advance(pieces, &at, 0);
    while (link->start < link->end && at.index < pieces->count) {
        const struct iovec *piece = &pieces->iov[at.index];
        size_t n = piece->iov_len - at.offset, have = link->end - link->start;
        n = n < have ? n : have;
        memcpy((char *)piece->iov_base + at.offset, link->buffer + link->start, n);
        link->start += (uint32_t)n;
        done += n;
        p2pkv_advance(pieces, &at, n);
    }
    p2pkv_transfer got = {done, done < pieces->bytes ? EINTR : 0};
    while (got.error == EINTR) {
        got = p2pkv_recv_all(link->fd, (uintptr_t)pieces, got.bytes, deadline_ns, 0);
        if (got.error == EINTR && see_to_signals(state))
            return -1;
    }
    return got.error;
}

/* Head and table. The table is `*table`, which the caller frees unless it is in the buffer. */
static int receive_table(p2pkv_read_link *link, uint8_t **table, int64_t deadline_ns,
                         PyThreadState **state) {
    int error = receive_ahead(link, READ_REPLY, deadline_ns, state);
    if (error)
        return error;
    const uint8_t *head = link->buffer;
    link->payload = get_le(head + 16, 8);
    if (get_le(head, 4) != link->count || head[4] != READ_VERSION || head[5] != link->kind ||
        get_le(head + 8, 4) != link->id)
        return EPROTO;
    size_t size = read_table(link->kind, link->count);
    link->start = READ_REPLY;
    if (READ_REPLY + size <= sizeof link->buffer) {
        error = receive_ahead(link, READ_REPLY + size, deadline_ns, state);
        *table = link->buffer + READ_REPLY;
        link->start = (uint32_t)(READ_REPLY + size);
        return error;
    }
    struct iovec iov = {*table = malloc(size), size};
    if (*table == NULL)
        return ENOMEM;
    struct p2pkv_pieces pieces = {.count = 1, .bytes = size, .iov = &iov};
    return receive_into(link, &pieces, deadline_ns, state);
}

static int is_told(uint64_t of_key) {
    return of_key == 0 || of_key == READ_MISS_BYTE || of_key == READ_ASK_BYTE;
}

static int are_flags(const p2pkv_read_link *link, const uint8_t *table) {
    for (size_t i = 0; i < link->count; i++)
        if (!is_told(table[i]))
            return 0;
    return link->payload == 0;
}

static int is_match(const p2pkv_read_link *link, const uint8_t *table) {
    uint64_t there = get_le(table, 4), next = get_le(table + 4, 4);
    return there <= link->count && (there == link->count) == (next == 0) && is_told(next) &&
           link->payload == 0;
}

static int is_sound(const p2pkv_read_link *link, const uint8_t *table) {
    uint64_t total = 0;
    if (link->kind == READ_MATCH)
        return is_match(link, table);
    if (link->kind == READ_EXISTS)
        return are_flags(link, table);
    for (size_t i = 0; i < link->count; i++) {
        uint64_t size = get_le(table + 8 * i, 8);
        if (size == READ_ASK || size == READ_MISS)
            continue;
        if (size > link->payload_max - total)
            return 0;
        total += size;
    }
    return total == link->payload;
}

/* The sizes as a list; -1 for those that are to be asked for, -2 for what is not there. */
static PyObject *sizes_of(const p2pkv_read_link *link, const uint8_t *table) {
    PyObject *sizes = PyList_New((Py_ssize_t)link->count);
    for (size_t i = 0; sizes != NULL && i < link->count; i++) {
        PyObject *size = PyLong_FromLongLong((long long)get_le(table + 8 * i, 8));
        if (size == NULL || PyList_SetItem(sizes, (Py_ssize_t)i, size))
            Py_CLEAR(sizes);
    }
    return sizes;
}

static PyObject *of_table(const p2pkv_read_link *link, const uint8_t *table) {
    if (link->kind == READ_GET)
        return sizes_of(link, table);
    if (link->kind == READ_EXISTS)
        return PyBytes_FromStringAndSize((const char *)table, (Py_ssize_t)link->count);
    return Py_BuildValue("II", (unsigned)get_le(table, 4), (unsigned)get_le(table + 4, 4));
}

/* What a table that was received says, or NULL with an error or an exception. */
static PyObject *take_table(p2pkv_read_link *link, uint8_t *table, int *error) {
    if (*error == 0 && !is_sound(link, table))
        *error = EPROTO;
    PyObject *told = *error == 0 ? of_table(link, table) : NULL;
    if (table != link->buffer + READ_REPLY)
        free(table);
    return told;
}

/* (error, told, values), None for what is not there; NULL if an exception is set. Takes both. */
static PyObject *finished(int error, PyObject *told, PyObject *values) {
    if (error < 0 || (error == 0 && told == NULL)) {
        Py_XDECREF(told);
        Py_XDECREF(values);
        return NULL;
    }
    PyObject *result = Py_BuildValue("iOO", error, told ? told : Py_None, values ? values : Py_None);
    Py_XDECREF(told);
    Py_XDECREF(values);
    return result;
}

/* (error, what the table says, None); of a GET the payload is still to be taken. */
static PyObject *read_table_of(size_t address, int64_t deadline_ns) {
    p2pkv_read_link *link = (void *)address;
    uint8_t *table = NULL;
    PyThreadState *state = PyEval_SaveThread();
    int error = receive_table(link, &table, deadline_ns, &state);
    PyEval_RestoreThread(state);
    PyObject *told = take_table(link, table, &error);
    return finished(error, told, NULL);
}

static PyObject *read_into(size_t address, size_t pieces, int64_t deadline_ns) {
    PyThreadState *state = PyEval_SaveThread();
    int error = receive_into((void *)address, (void *)pieces, deadline_ns, &state);
    PyEval_RestoreThread(state);
    return error < 0 ? NULL : PyLong_FromLong(error);
}

/* A bytes object for each value, None for those that do not come, and where they are filled. */
static PyObject *room_for(PyObject *sizes, struct p2pkv_pieces *pieces, struct iovec *iov) {
    Py_ssize_t count = PyList_Size(sizes);
    PyObject *values = PyList_New(count);
    for (Py_ssize_t i = 0; values != NULL && i < count; i++) {
        long long size = PyLong_AsLongLong(PyList_GetItem(sizes, i));
        PyObject *value = Py_None;
        if (size < 0)
            Py_INCREF(value);
        else if ((value = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size)) != NULL) {
            iov[pieces->count++] = (struct iovec){PyBytes_AsString(value), (size_t)size};
            pieces->bytes += (uint64_t)size;
        }
        if (value == NULL || PyList_SetItem(values, i, value))
            Py_CLEAR(values);
    }
    return values;
}

/* (error, values) for the sizes that `read_table_of` gave. */
static PyObject *read_values(size_t address, PyObject *sizes, int64_t deadline_ns) {
    p2pkv_read_link *link = (void *)address;
    struct iovec few[64];
    Py_ssize_t count = PyList_Size(sizes);
    if (count < 0)
        return NULL;
    struct iovec *iov = count <= 64 ? few : malloc((size_t)count * sizeof *iov);
    if (iov == NULL)
        return PyErr_NoMemory();
    struct p2pkv_pieces pieces = {.count = 0, .bytes = 0, .iov = iov};
    PyObject *values = room_for(sizes, &pieces, iov), *result = NULL;
    if (values != NULL) {
        PyThreadState *state = PyEval_SaveThread();
        int error = receive_into(link, &pieces, deadline_ns, &state);
        PyEval_RestoreThread(state);
        if (error >= 0)
            result = Py_BuildValue("iO", error, values);
        Py_DECREF(values);
    }
    if (iov != few)
        free(iov);
    return result;
}

/* All at once: (error, what `read_table_of` and `read_values` give; of other kinds than GET no
 * values). */
static PyObject *read_all(size_t address, int kind, PyObject *keys, int64_t deadline_ns) {
    p2pkv_read_link *link = (void *)address;
    struct request request;
    uint8_t *table = NULL;
    if (encode(link, kind, keys, &request))
        return NULL;
    PyThreadState *state = PyEval_SaveThread();
    int error = send_request(link, &request, deadline_ns, &state);
    if (request.bytes != link->buffer)
        free(request.bytes);
    link->start = link->end = 0;
    if (error == 0)
        error = receive_table(link, &table, deadline_ns, &state);
    PyEval_RestoreThread(state);
    PyObject *told = take_table(link, table, &error), *values, *result;
    if (told == NULL || kind != READ_GET)
        return finished(error, told, NULL);
    result = read_values(address, told, deadline_ns);
    if (result == NULL || !PyArg_ParseTuple(result, "iO", &error, &values)) {
        Py_XDECREF(result);
        Py_DECREF(told);
        return NULL;
    }
    Py_INCREF(values);
    Py_DECREF(result);
    return finished(error, told, values);
}

uintptr_t p2pkv_read_function(int which) {
    switch (which) {
    case 0:
        return (uintptr_t)read_ask;
    case 1:
        return (uintptr_t)read_table_of;
    case 2:
        return (uintptr_t)read_into;
    case 3:
        return (uintptr_t)read_values;
    case 4:
        return (uintptr_t)read_all;
    default:
        return 0;
    }
}
