#ifndef P2PKV_UCX_H
#define P2PKV_UCX_H

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <ucp/api/ucp.h>

#include "ucx_api.h"

/*
 * libucp is found at run time, so that one build serves any libucp of UCX 1.x: the system's with
 * verbs, or a wheel's without. The layouts come from the headers: UCX lets structures grow at their
 * end only, and a library reads no field whose bit it does not know.
 */
#define P2PKV_UCX_FUNCTIONS(F) \
    F(ucp_config_modify)       \
    F(ucp_config_read)         \
    F(ucp_config_release)      \
    F(ucp_cleanup)             \
    F(ucp_context_print_info)  \
    F(ucp_ep_close_nbx)        \
    F(ucp_ep_create)           \
    F(ucp_ep_flush_nbx)        \
    F(ucp_ep_query)            \
    F(ucp_ep_rkey_unpack)      \
    F(ucp_get_nbx)             \
    F(ucp_get_version)         \
    F(ucp_init_version)        \
    F(ucp_mem_map)             \
    F(ucp_mem_unmap)           \
    F(ucp_put_nbx)             \
    F(ucp_request_free)        \
    F(ucp_rkey_buffer_release) \
    F(ucp_rkey_destroy)        \
    F(ucp_rkey_pack)           \
    F(ucp_worker_arm)          \
    F(ucp_worker_create)       \
    F(ucp_worker_destroy)      \
    F(ucp_worker_get_address)  \
    F(ucp_worker_get_efd)      \
    F(ucp_worker_progress)     \
    F(ucp_worker_release_address) \
    F(ucs_status_string)

struct p2pkv_ucx_library {
    void *handle;
#define F(name) __typeof__(name) *name;
    P2PKV_UCX_FUNCTIONS(F)
#undef F
};

/* The oldest API that has all that is used here; a library refuses to serve a later one. */
enum { P2PKV_UCX_API_MAJOR = 1, P2PKV_UCX_API_MINOR = 12 };

/* -- rings: doubly linked lists whose head is one of them */

struct ring {
    struct ring *prev, *next;
};

static inline void ring_init(struct ring *ring) {
    ring->prev = ring->next = ring;
}

static inline int ring_empty(const struct ring *head) {
    return head->next == head;
}

static inline void ring_append(struct ring *head, struct ring *entry) {
    entry->prev = head->prev, entry->next = head;
    head->prev->next = entry;
    head->prev = entry;
}

static inline void ring_remove(struct ring *entry) {
    entry->prev->next = entry->next;
    entry->next->prev = entry->prev;
}

static inline void ring_move(struct ring *head, struct ring *entry) {
    ring_remove(entry);
    ring_append(head, entry);
}

#define ENTRY(at, type) ((type *)((char *)(at) - offsetof(type, ring)))
#define EACH(at, after, head) \
    struct ring *at = (head)->next, *after = at->next; \
    at != (head); \
    at = after, after = at->next

/* -- what an engine has */

struct p2pkv_ucx_region {
    p2pkv_ucx_engine *engine;
    uint64_t address, length, chunk;
    uint64_t pieces; /* under way that use it; atomic */
    int memory_type;
    size_t chunks;
    ucp_mem_h memh[];
};

struct remote {
    uint64_t address, length, chunk;
    uint64_t pieces; /* under way that use it */
    size_t chunks;
    ucp_rkey_h rkey[];
};

struct p2pkv_ucx_engine {
    const p2pkv_ucx_library *ucx;
    ucp_context_h context;
    ucp_worker_h worker;
    int event_fd;
    struct ring links, gone;   /* open or closing; freed once they were told of */
    struct ring active, done;  /* batches */
    uint64_t link_count, active_count, lost_count;
    pthread_mutex_t lock;      /* of the regions: the rest is one thread's */
    p2pkv_ucx_region **regions; /* sorted by address; none overlaps another */
    size_t region_count, region_room;
};

struct p2pkv_ucx_link {
    struct ring ring; /* links, then gone */
    p2pkv_ucx_engine *engine;
    uint64_t id;
    ucp_ep_h ep;
    uint64_t batches;
    int lost, told; /* status of the loss; whether the loop knows */
    int closing, closed;
    struct remote **remotes; /* by key; NULL where none was attached */
    size_t remote_count;
};

struct batch {
    struct ring ring; /* active, then done */
    p2pkv_ucx_link *link;
    uint64_t id;
    size_t waiting; /* requests under way, and one while it is being posted */
    ucs_status_t status;
    size_t count;
    struct place {
        p2pkv_ucx_region *region;
        struct remote *remote;
    } place[]; /* of each piece */
};

static inline int inside(uint64_t address, uint64_t length, uint64_t base, uint64_t size) {
    return address >= base && address - base <= size && length <= size - (address - base);
}

/* The place of the first region that ends behind `address`. Under the lock. */
size_t p2pkv_ucx_region_place(const p2pkv_ucx_engine *engine, uint64_t address);

void p2pkv_ucx_region_free(p2pkv_ucx_region *region);
void p2pkv_ucx_link_drop_remotes(p2pkv_ucx_link *link);

#endif
