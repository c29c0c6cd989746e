#ifndef P2PKV_READ_SERVER_H
#define P2PKV_READ_SERVER_H

#include <pthread.h>

#include "index.h"
#include "native.h"
#include "read_protocol.h"

/* A reply on its way out. `iov` is what has not left yet: head and table, then the values where they
 * lie in the arena; `holds` are the places of those. */
struct reply {
    struct iovec *iov;
    uint64_t *holds;
    size_t pieces, held;
    uint64_t left;
};

/* Written by all threads, read at any time. */
struct figures {
    uint64_t connections, dropped, requests, values, misses, flags, absent, asks, bytes;
};

struct read_server {
    const struct p2pkv_index *index;
    const uint8_t *arena;
    uint64_t arena_bytes, payload_max;
    int64_t stall_ns, spin_ns;
    uint32_t connections_max, threads;
    int listener;
    uint8_t token[READ_TOKEN];
    int stopping;
    struct figures figures;
    struct worker *workers;
};

static inline void count(uint64_t *figure, uint64_t n) {
    __atomic_fetch_add(figure, n, __ATOMIC_RELAXED);
}

/* Memory for the largest reply there can be; its head and table lie in `*head`. False: none. */
int read_reply_make(struct reply *reply, uint8_t **head);
void read_reply_free(struct reply *reply, uint8_t *head);

/* Looks everything up, and holds the values that are to be sent. */
void read_answer(struct read_server *server, const struct read_request *request,
                 struct reply *reply, uint8_t *head);

/* What has left is forgotten. */
void read_reply_advance(struct reply *reply, uint64_t sent);

/* The rest of a reply in memory of its own; NULL: there is none. To be freed. */
struct reply *read_reply_keep(const struct reply *reply);

/* Lets go of its values. */
void read_reply_end(const struct read_server *server, struct reply *reply);

#endif
