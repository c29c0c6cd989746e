/*
 * Pieces out of Python objects. These functions touch objects, so they run with the GIL and raise;
 * Python reaches them by address (see `p2pkv_python_function`), not by cffi, which gives it away.
 * One buffer costs a tenth of what `ffi.from_buffer` and two array items do.
 */
#include <pyconfig.h>
#ifndef Py_GIL_DISABLED
#define Py_LIMITED_API 0x030b0000
#endif
#include <Python.h>

#include "native.h"

static struct p2pkv_pieces *pieces_new(Py_ssize_t count, size_t extra) {
    size_t limit = ((size_t)PY_SSIZE_T_MAX - sizeof(struct p2pkv_pieces)) /
                   (sizeof(struct iovec) + sizeof(Py_buffer));
    if ((size_t)count > limit) {
        PyErr_NoMemory();
        return NULL;
    }
    size_t n = (size_t)count;
    struct p2pkv_pieces *pieces =
        PyMem_Malloc(sizeof(*pieces) + n * sizeof(struct iovec) + n * extra);
    if (pieces == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    pieces->count = n;
    pieces->bytes = 0;
    pieces->owner = NULL;
    pieces->iov = (struct iovec *)(void *)(pieces + 1);
    return pieces;
}

static void release(Py_buffer *buffers, size_t n) {
    while (n > 0)
        PyBuffer_Release(&buffers[--n]);
}

static PyObject *described(const struct p2pkv_pieces *pieces) {
    return Py_BuildValue("nK", (Py_ssize_t)(uintptr_t)pieces, (unsigned long long)pieces->bytes);
}

static int add(struct p2pkv_pieces *pieces, size_t i, void *address, size_t length) {
    if (length > (uint64_t)INT64_MAX - pieces->bytes) {
        PyErr_Format(PyExc_OverflowError, "lengths: together over 2**63 - 1 bytes");
        return -1;
    }
    ((struct iovec *)pieces->iov)[i] = (struct iovec){address, length};
    pieces->bytes += length;
    return 0;
}

/* (address, bytes) of pieces that hold each buffer of the sequence until they are freed. */
static PyObject *of_buffers(PyObject *sequence, int writable) {
    Py_ssize_t count = PySequence_Size(sequence);
    struct p2pkv_pieces *pieces;
    if (count < 0 || (pieces = pieces_new(count, sizeof(Py_buffer))) == NULL)
        return NULL;
    Py_buffer *buffers = (Py_buffer *)(void *)(pieces->iov + count);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(sequence, i);
        int failed = item == NULL ||
                     PyObject_GetBuffer(item, &buffers[i], writable ? PyBUF_WRITABLE : PyBUF_SIMPLE);
        Py_XDECREF(item);
        if (!failed && add(pieces, (size_t)i, buffers[i].buf, (size_t)buffers[i].len)) {
            PyBuffer_Release(&buffers[i]);
            failed = 1;
        }
        if (failed) {
            release(buffers, (size_t)i);
            PyMem_Free(pieces);
            return NULL;
        }
    }
    pieces->owner = buffers;
    return described(pieces);
}

/* An item as a size: not negative, no float. */
static int size_at(PyObject *sequence, Py_ssize_t i, size_t *value) {
    PyObject *item = PySequence_GetItem(sequence, i);
    if (item == NULL)
        return -1;
    *value = PyLong_AsSize_t(item);
    Py_DECREF(item);
    return *value == (size_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* Raises for a piece that is not inside `limit` bytes or, without a base, has no address. */
static int check_place(Py_ssize_t i, size_t base, size_t limit, size_t offset, size_t length) {
    if (offset > limit || length > limit - offset)
        PyErr_Format(PyExc_IndexError, "piece %zd: %zu bytes at %zu are not within %zu bytes", i,
                     length, offset, limit);
    else if (base + offset == 0 && length > 0)
        PyErr_Format(PyExc_ValueError, "piece %zd: its address is 0", i);
    else
        return 0;
    return -1;
}

static int fill_places(struct p2pkv_pieces *pieces, size_t base, size_t limit, PyObject *offsets,
                       PyObject *lengths) {
    for (Py_ssize_t i = 0; i < (Py_ssize_t)pieces->count; i++) {
        size_t offset, length;
        if (size_at(offsets, i, &offset) || size_at(lengths, i, &length) ||
            check_place(i, base, limit, offset, length) ||
            add(pieces, (size_t)i, (void *)(base + offset), length))
            return -1;
    }
    return 0;
}

/* (address, bytes) of pieces at `base` + offset. Whoever calls keeps the memory in place. */
static PyObject *of_places(size_t base, size_t limit, PyObject *offsets, PyObject *lengths) {
    Py_ssize_t count = PySequence_Size(offsets), others = PySequence_Size(lengths);
    struct p2pkv_pieces *pieces;
    if (count < 0 || others < 0)
        return NULL;
    if (count != others)
        return PyErr_Format(PyExc_ValueError, "%zd addresses but %zd lengths", count, others);
    if ((pieces = pieces_new(count, 0)) == NULL)
        return NULL;
    if (fill_places(pieces, base, limit, offsets, lengths)) {
        PyMem_Free(pieces);
        return NULL;
    }
    return described(pieces);
}

/* (address, bytes) of a copy of pieces `first` to `last`; the original must outlive it. */
static PyObject *of_part(size_t whole, Py_ssize_t first, Py_ssize_t last) {
    const struct p2pkv_pieces *all = (const void *)whole;
    struct p2pkv_pieces *pieces = pieces_new(last - first, 0);
    if (pieces == NULL)
        return NULL;
    for (Py_ssize_t i = first; i < last; i++)
        if (add(pieces, (size_t)(i - first), all->iov[i].iov_base, all->iov[i].iov_len)) {
            PyMem_Free(pieces);
            return NULL;
        }
    return described(pieces);
}

static PyObject *free_pieces(size_t address) {
    struct p2pkv_pieces *pieces = (void *)address;
    if (pieces->owner)
        release(pieces->owner, pieces->count);
    PyMem_Free(pieces);
    Py_RETURN_NONE;
}

uintptr_t p2pkv_python_function(int which) {
    switch (which) {
    case 0:
        return (uintptr_t)of_buffers;
    case 1:
        return (uintptr_t)of_places;
    case 2:
        return (uintptr_t)of_part;
    case 3:
        return (uintptr_t)free_pieces;
    default:
        return p2pkv_index_function(which - 4);
    }
}
