#ifndef P2PKV_INDEX_H
#define P2PKV_INDEX_H

/*
 * The published index: where the values of a node lie, in memory that every process of the host may
 * map. The node writes it, from one thread; others read it without asking or waiting.
 *
 * The memory is zero at first, and 64-byte aligned:
 *
 *     header | gates: one a bucket | holds | tags: 8 a group | slots: 8 a group
 *
 * A key may stand in either of two groups, by its hash. A group's tags (hashes, 0: free) fill one
 * line of cache. A slot is a seqlock: its `seq` is odd while it is written. What is read between two
 * equal values of `seq` stood there together at one moment, and so did the bucket's gate if it was
 * read between them, too. That moment is when the read takes place (its linearization point); it
 * counts if by a clock that is read afterwards the gate was still open and the node alive.
 *
 * A key that stands in none of its slots is not there if its bucket's gate was open, without an
 * interruption, from before the slots were looked at, and no object of the bucket was left out then.
 *
 * Readers in the node's process that use a value where it lies `hold` it: the store frees no extent
 * of which `p2pkv_index_held` is true. Others copy, and look at the value's header afterwards.
 */

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

enum {
    P2PKV_INDEX_LAYOUT = 2,
    P2PKV_INDEX_KEY_MAX = 128, /* longer keys are not published */
    P2PKV_INDEX_KEY_WORDS = P2PKV_INDEX_KEY_MAX / 8,
    P2PKV_INDEX_WAYS = 8,
    P2PKV_INDEX_HOLDS = 16384, /* counters of holds; values may share one */
    P2PKV_VALUE_HEADER = 64,
    P2PKV_VALUE_COMMITTED = 1
};

#define P2PKV_VALUE_MAGIC 0x31766b703270ull /* "p2pkv1", as in objects.py */

/* The 64 bytes before a value, as in objects.py. */
struct p2pkv_value_header {
    uint64_t magic, key_hash, size, version, checksum;
    uint32_t state, has_checksum;
    uint64_t reserved[2];
};

#define P2PKV_INDEX_MAGIC 0x3178656469766b70ull /* "pkvidex1" */

/* Counters have lines of their own: readers of all processes write to them. */
struct p2pkv_index {
    uint64_t magic; /* written last */
    uint32_t layout;
    uint32_t buckets;
    uint64_t groups;
    uint64_t gates_at, holds_at, tags_at, slots_at, bytes; /* from the start of the header */
    /* A robust mutex that a thread of the node holds: the kernel marks `*alive_at` when the thread
     * ends, however it ends, before any lock or connection of the process is given back. */
    _Alignas(64) unsigned char mutex[64];
    _Atomic uint32_t alive_at;    /* offset of the mutex's word */
    _Atomic uint32_t alive_value; /* what it reads while the node lives; 0: closed */
    _Alignas(64) _Atomic uint64_t hits; /* values read */
    _Atomic uint64_t misses;            /* values that were wanted and are not there */
    _Atomic uint64_t present, absent;   /* keys seen to be there, and not to be there */
    _Atomic uint64_t torn;              /* values that changed while they were copied */
    _Alignas(64) _Atomic uint64_t published;
    _Atomic uint64_t refused; /* objects that are not, for want of room or by their key's length */
    _Atomic uint32_t broken;  /* some may be missing without having been counted */
};

struct p2pkv_gate {
    _Atomic uint64_t serve_until; /* CLOCK_MONOTONIC, ns: nobody else serves the bucket before; 0: closed */
    _Atomic uint32_t unpublished; /* objects of the bucket that found no room in the index */
    _Atomic uint32_t closings;    /* how often it was closed; rises after `serve_until` is 0 */
};

struct p2pkv_slot {
    _Atomic uint32_t seq;
    _Atomic uint32_t bucket;
    _Atomic uint64_t offset; /* of the value in the arena; its header is before it */
    _Atomic uint64_t size;
    _Atomic uint64_t version;    /* as in the header; never comes back */
    _Atomic uint64_t expires_at; /* CLOCK_MONOTONIC, ns; 0: never */
    _Atomic uint32_t key_bytes;
    _Atomic uint32_t flags;
    _Atomic uint32_t used; /* set by readers, taken by the eviction policy */
    uint32_t pad;
    uint64_t reserved;
    _Atomic uint64_t key[P2PKV_INDEX_KEY_WORDS]; /* zeros behind the end */
};

enum { P2PKV_FLAG_WRITE_ONCE = 1 };

/* A key, ready to be looked for. */
struct p2pkv_key {
    uint64_t hash;
    uint32_t bytes;
    uint32_t words;
    uint64_t word[P2PKV_INDEX_KEY_WORDS];
};

/* What stood in a slot, and in its bucket's gate, at one moment. */
struct p2pkv_entry {
    uint64_t slot;
    uint64_t offset, size, version, expires_at;
    uint64_t serve_until;
    uint32_t bucket, flags, seq;
};

static inline struct p2pkv_gate *p2pkv_gates(const struct p2pkv_index *index) {
    return (void *)((uintptr_t)index + index->gates_at);
}
static inline _Atomic uint32_t *p2pkv_holds(const struct p2pkv_index *index) {
    return (void *)((uintptr_t)index + index->holds_at);
}
static inline _Atomic uint64_t *p2pkv_tags(const struct p2pkv_index *index) {
    return (void *)((uintptr_t)index + index->tags_at);
}
static inline struct p2pkv_slot *p2pkv_slots(const struct p2pkv_index *index) {
    return (void *)((uintptr_t)index + index->slots_at);
}

/* -- reading: any thread of any process, no locks */

/* False for keys that are never published: empty or too long. */
int p2pkv_key_set(struct p2pkv_key *key, const void *bytes, size_t length);

/* Brings the tags of the first group up ahead of `find`. */
void p2pkv_index_prefetch(const struct p2pkv_index *index, const struct p2pkv_key *key);

/* 1, with the entry, if the key is there: it counts only if `fresh` afterwards. 0: it is not in the
 * index, which tells nothing, see `absent`. -1: ask again or the owner. */
int p2pkv_index_find(const struct p2pkv_index *index, const struct p2pkv_key *key,
                     struct p2pkv_entry *entry);

/* Whether the node that serves the key's bucket had no such key at one moment since the call began.
 * It counts only if `fresh` afterwards; of the entry only what that looks at is set. */
int p2pkv_index_absent(const struct p2pkv_index *index, const struct p2pkv_key *key,
                       struct p2pkv_entry *entry);

/* The bucket of a key, as in ring.py; `buckets` is a power of two. */
uint32_t p2pkv_bucket_of(const void *key, size_t bytes, uint32_t buckets);

/* The clock for `fresh`, to be read after `find`; 0 if the node is not alive any more. */
uint64_t p2pkv_index_now(const struct p2pkv_index *index);

static inline int p2pkv_entry_fresh(const struct p2pkv_entry *entry, uint64_t now) {
    return now && now < entry->serve_until && (!entry->expires_at || now < entry->expires_at);
}

/* Whether the bytes that were copied from the arena were this value all the time. */
int p2pkv_entry_unchanged(const struct p2pkv_entry *entry, const void *arena);

/* Notes the use for the eviction policy. */
void p2pkv_index_use(const struct p2pkv_index *index, const struct p2pkv_entry *entry);

/* -- reading where the values lie: threads of the node's process */

/* Keeps the memory of a found value from being used for anything else. False: it left meanwhile,
 * and nothing is held. To be let go of once for each time. */
int p2pkv_index_hold(const struct p2pkv_index *index, const struct p2pkv_entry *entry);
void p2pkv_index_let_go(const struct p2pkv_index *index, uint64_t offset);

/* -- writing: one thread of the node */

/* For writing: brings the tags of both groups up, and then the slot that a new key is likely to get. */
void p2pkv_index_prefetch_tags(const struct p2pkv_index *index, const struct p2pkv_key *key);
void p2pkv_index_prefetch_free(const struct p2pkv_index *index, const struct p2pkv_key *key);

/* Publishes an object, in the place of one of the same key. Its slot, or -1: there is no room. */
int64_t p2pkv_index_publish(struct p2pkv_index *index, const struct p2pkv_key *key,
                            const struct p2pkv_entry *entry);

/* In the place of the slot of an object that has none: there was no room, it is not to be published,
 * its key is too long. */
enum { P2PKV_SLOT_REFUSED = -1, P2PKV_SLOT_NOWHERE = -2, P2PKV_SLOT_UNFIT = -3 };

/* An object's slot is not what it was. Of those that are not in the index its bucket counts only what
 * somebody may look for. */
void p2pkv_index_recount(struct p2pkv_index *index, uint32_t bucket, int64_t before, int64_t now);

/* Takes the object of this version out of its slot; nothing if another is there. */
int p2pkv_index_withdraw(struct p2pkv_index *index, uint64_t slot, uint64_t version);

/* Whether a thread of this process holds a value; to be asked after it was withdrawn. */
int p2pkv_index_held(const struct p2pkv_index *index, uint64_t offset);

#endif
