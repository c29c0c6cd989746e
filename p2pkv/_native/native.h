#ifndef P2PKV_NATIVE_H
#define P2PKV_NATIVE_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "api.h"
#include "read_api.h"

/* Pieces of memory taken as one run of bytes. */
struct p2pkv_pieces {
    size_t count;
    uint64_t bytes;
    void *owner; /* what keeps the memory in place, for python_pieces.c */
    const struct iovec *iov;
};

/* A place in the run: `offset` bytes into piece `index`. */
struct p2pkv_cursor {
    size_t index;
    size_t offset;
};

/* Moves on by `n` bytes, past pieces of no length; stops at the end. */
static inline void p2pkv_advance(const struct p2pkv_pieces *pieces, struct p2pkv_cursor *at,
                                 uint64_t n) {
    while (at->index < pieces->count) {
        size_t rest = pieces->iov[at->index].iov_len - at->offset;
        if (n < rest) {
            at->offset += (size_t)n;
            return;
        }
        n -= rest;
        at->index++;
        at->offset = 0;
    }
}

/* Parts of p2pkv_copy. */
int p2pkv_has_null(const struct p2pkv_pieces *pieces);
void p2pkv_copy_run(char *target, const char *source, size_t n, int streaming);
void p2pkv_copy_fence(void);

/* XXH3 (64 bits) of bytes in one piece. */
uint64_t p2pkv_hash(const uint8_t *bytes, size_t n);

/* The same, with a seed, of up to so many bytes. */
enum { P2PKV_HASH_SHORT_MAX = 240 };
uint64_t p2pkv_hash_short(const void *bytes, size_t n, uint64_t seed);

/* Until something may be received: 0, ETIMEDOUT, or the errno of poll. It polls for `spin_ns` first;
 * `*slept` tells whether that was in vain. */
int p2pkv_wait_readable(int fd, int64_t deadline_ns, int64_t spin_ns, int *slept);

int p2pkv_thread(pthread_t *made, const pthread_attr_t *attributes, void *(*run)(void *),
                 void *argument);

/* The functions of python_index.c and python_commit.c. */
uintptr_t p2pkv_index_function(int which);
uintptr_t p2pkv_commit_function(void);

#endif
