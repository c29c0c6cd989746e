/* The published index; index.h says how it works. */
#include "index.h"

#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "native.h"

enum { LINE = 64, FIND_TRIES = 4 };

#define NO_SLOT UINT64_MAX

_Static_assert(sizeof(struct p2pkv_slot) == 192, "a slot is three lines");
_Static_assert(sizeof(struct p2pkv_gate) == 16, "gates are laid out by the file's format");
_Static_assert(sizeof(struct p2pkv_index) == 320, "the header is laid out by the file's format");
_Static_assert(sizeof(pthread_mutex_t) <= 64, "the header has room for a mutex");

#define READ(p) atomic_load_explicit(p, memory_order_relaxed)
#define WRITE(p, v) atomic_store_explicit(p, v, memory_order_relaxed)

/* -- layout */

static uint64_t lines(uint64_t bytes) {
    return (bytes + LINE - 1) & ~(uint64_t)(LINE - 1);
}

static uint64_t layout(struct p2pkv_index *index, uint64_t bytes, uint32_t buckets) {
    index->gates_at = sizeof(*index);
    index->holds_at = index->gates_at + lines((uint64_t)buckets * sizeof(struct p2pkv_gate));
    index->tags_at = index->holds_at + lines(P2PKV_INDEX_HOLDS * sizeof(uint32_t));
    uint64_t group = P2PKV_INDEX_WAYS * (sizeof(uint64_t) + sizeof(struct p2pkv_slot));
    index->groups = bytes > index->tags_at ? (bytes - index->tags_at) / group : 0;
    index->slots_at = index->tags_at + index->groups * P2PKV_INDEX_WAYS * sizeof(uint64_t);
    index->buckets = buckets;
    index->bytes = bytes;
    return index->groups;
}

uint64_t p2pkv_index_bytes(uint64_t slots, uint32_t buckets) {
    struct p2pkv_index index;
    layout(&index, 0, buckets);
    uint64_t groups = (slots + P2PKV_INDEX_WAYS - 1) / P2PKV_INDEX_WAYS;
    return index.tags_at +
           groups * P2PKV_INDEX_WAYS * (sizeof(uint64_t) + sizeof(struct p2pkv_slot));
}

/* -- the node's life */

/* Holds the mutex until it is told to end. A thread of its own, since a mutex belongs to a thread,
 * and who makes the index need not be the one who ends it. */
struct keeper {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    struct p2pkv_index *index;
    int holds, ends, error;
};

static int hold_mutex(struct p2pkv_index *index) {
    pthread_mutexattr_t attributes;
    pthread_mutex_t *mutex = (void *)index->mutex;
    int error = pthread_mutexattr_init(&attributes);
    if (error)
        return error;
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    error = pthread_mutex_init(mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
    if (error)
        return error;
    uint32_t before[16], after[16];
    memcpy(before, index->mutex, sizeof(before));
    if ((error = pthread_mutex_lock(mutex)))
        return error;
    memcpy(after, index->mutex, sizeof(after));
    for (uint32_t i = 0; i < 16; i++)
        if (before[i] == 0 && after[i] != 0) { /* the lock word stands first in every libc */
            atomic_store(&index->alive_at, (uint32_t)offsetof(struct p2pkv_index, mutex) + 4 * i);
            atomic_store(&index->alive_value, after[i]);
            return 0;
        }
    pthread_mutex_unlock(mutex);
    return ENOTSUP;
}

static void *keep(void *argument) {
    struct keeper *keeper = argument;
    int error = hold_mutex(keeper->index);
    pthread_mutex_lock(&keeper->lock);
    keeper->error = error;
    keeper->holds = 1;
    pthread_cond_broadcast(&keeper->changed);
    while (!keeper->ends)
        pthread_cond_wait(&keeper->changed, &keeper->lock);
    pthread_mutex_unlock(&keeper->lock);
    if (!error) {
        atomic_store(&keeper->index->alive_value, 0);
        pthread_mutex_unlock((void *)keeper->index->mutex);
    }
    return NULL;
}

static int start_keeper(struct keeper *keeper) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, PTHREAD_STACK_MIN + (64 << 10));
    int error = p2pkv_thread(&keeper->thread, &attributes, keep, keeper);
    pthread_attr_destroy(&attributes);
    if (error)
        return error;
    pthread_mutex_lock(&keeper->lock);
    while (!keeper->holds)
        pthread_cond_wait(&keeper->changed, &keeper->lock);
    error = keeper->error;
    pthread_mutex_unlock(&keeper->lock);
    return error;
}

void p2pkv_index_close(uintptr_t opaque) {
    struct keeper *keeper = (void *)opaque;
    pthread_mutex_lock(&keeper->lock);
    keeper->ends = 1;
    pthread_cond_broadcast(&keeper->changed);
    pthread_mutex_unlock(&keeper->lock);
    pthread_join(keeper->thread, NULL);
    pthread_cond_destroy(&keeper->changed);
    pthread_mutex_destroy(&keeper->lock);
    free(keeper);
}

uintptr_t p2pkv_index_create(uintptr_t memory, uint64_t bytes, uint32_t buckets) {
    struct p2pkv_index *index = (void *)memory;
    if (memory % LINE || bytes < sizeof(*index) || !layout(index, bytes, buckets)) {
        errno = EINVAL;
        return 0;
    }
    struct keeper *keeper = calloc(1, sizeof(*keeper));
    if (keeper == NULL)
        return 0;
    pthread_mutex_init(&keeper->lock, NULL);
    pthread_cond_init(&keeper->changed, NULL);
    keeper->index = index;
    index->layout = P2PKV_INDEX_LAYOUT;
    int error = start_keeper(keeper);
    if (error) {
        if (keeper->holds)
            p2pkv_index_close((uintptr_t)keeper);
        else
            free(keeper);
        errno = error;
        return 0;
    }
    atomic_thread_fence(memory_order_release);
    index->magic = P2PKV_INDEX_MAGIC;
    return (uintptr_t)keeper;
}

int p2pkv_index_check(uintptr_t memory, uint64_t bytes) {
    const struct p2pkv_index *index = (const void *)memory;
    struct p2pkv_index expected;
    if (memory % LINE || bytes < sizeof(*index) || index->magic != P2PKV_INDEX_MAGIC ||
        index->layout != P2PKV_INDEX_LAYOUT || index->bytes != bytes ||
        index->buckets > bytes / sizeof(struct p2pkv_gate))
        return 0;
    return layout(&expected, bytes, index->buckets) && expected.groups == index->groups &&
           expected.gates_at == index->gates_at && expected.holds_at == index->holds_at &&
           expected.tags_at == index->tags_at && expected.slots_at == index->slots_at;
}

static int alive(const struct p2pkv_index *index) {
    uint32_t at = atomic_load_explicit(&index->alive_at, memory_order_acquire);
    uint32_t value = atomic_load_explicit(&index->alive_value, memory_order_acquire);
    if (value == 0 || at > sizeof(*index) - 4)
        return 0;
    const _Atomic uint32_t *word = (const void *)((uintptr_t)index + (at & ~3u));
    return atomic_load_explicit(word, memory_order_acquire) == value;
}

int p2pkv_index_alive(uintptr_t memory) {
    return alive((const void *)memory);
}

uint64_t p2pkv_index_now(const struct p2pkv_index *index) {
    struct timespec time;
    atomic_thread_fence(memory_order_acquire);
    clock_gettime(CLOCK_MONOTONIC, &time);
    return alive(index) ? (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec : 0;
}

/* -- keys */

static uint64_t mix(uint64_t h) {
    h ^= h >> 32;
    h *= 0xd6e8feb86659fd93ull;
    h ^= h >> 32;
    h *= 0xd6e8feb86659fd93ull;
    return h ^ h >> 32;
}

int p2pkv_key_set(struct p2pkv_key *key, const void *bytes, size_t length) {
    if (length == 0 || length > P2PKV_INDEX_KEY_MAX)
        return 0;
    key->bytes = (uint32_t)length;
    key->words = (uint32_t)(length + 7) / 8;
    key->word[key->words - 1] = 0;
    memcpy(key->word, bytes, length);
    uint64_t h = length * 0x9e3779b97f4a7c15ull;
    for (uint32_t i = 0; i < key->words; i++) {
        h = (h ^ key->word[i]) * 0xd6e8feb86659fd93ull;
        h ^= h >> 29;
    }
    h = mix(h);
    key->hash = h ? h : 1;
    return 1;
}

static uint64_t reduce(uint64_t hash, uint64_t groups) {
    return (uint64_t)(((unsigned __int128)hash * groups) >> 64);
}

static uint64_t group_of(const struct p2pkv_index *index, uint64_t hash, int which) {
    return reduce(which ? mix(hash) : hash, index->groups);
}

static int same_key(const struct p2pkv_slot *slot, const struct p2pkv_key *key) {
    uint64_t differ = READ(&slot->key_bytes) ^ key->bytes;
    for (uint32_t i = 0; i < key->words; i++)
        differ |= READ(&slot->key[i]) ^ key->word[i];
    return differ == 0;
}

/* -- reading */

void p2pkv_index_prefetch(const struct p2pkv_index *index, const struct p2pkv_key *key) {
    __builtin_prefetch(
        (const void *)&p2pkv_tags(index)[group_of(index, key->hash, 0) * P2PKV_INDEX_WAYS]);
}

void p2pkv_index_prefetch_tags(const struct p2pkv_index *index, const struct p2pkv_key *key) {
    for (int which = 0; which < 2; which++)
        __builtin_prefetch(
            &p2pkv_tags(index)[group_of(index, key->hash, which) * P2PKV_INDEX_WAYS], 1);
}

static int read_slot(const struct p2pkv_index *index, uint64_t number, const struct p2pkv_key *key,
                     struct p2pkv_entry *entry) {
    const struct p2pkv_slot *slot = &p2pkv_slots(index)[number];
    for (int i = 0; i < FIND_TRIES; i++) {
        uint32_t seq = atomic_load_explicit(&slot->seq, memory_order_acquire);
        if (seq & 1)
            continue;
        int same = same_key(slot, key);
        entry->slot = number;
        entry->offset = READ(&slot->offset);
        entry->size = READ(&slot->size);
        entry->version = READ(&slot->version);
        entry->expires_at = READ(&slot->expires_at);
        entry->bucket = READ(&slot->bucket);
        entry->flags = READ(&slot->flags);
        entry->seq = seq;
        uint32_t bucket = entry->bucket < index->buckets ? entry->bucket : 0;
        entry->serve_until = atomic_load_explicit(&p2pkv_gates(index)[bucket].serve_until,
                                                  memory_order_acquire);
        atomic_thread_fence(memory_order_acquire);
        if (READ(&slot->seq) == seq)
            return same;
    }
    return -1;
}

int p2pkv_index_find(const struct p2pkv_index *index, const struct p2pkv_key *key,
                     struct p2pkv_entry *entry) {
    int result = 0;
    for (int which = 0; which < 2; which++) {
        uint64_t first = group_of(index, key->hash, which) * P2PKV_INDEX_WAYS;
        const _Atomic uint64_t *tags = &p2pkv_tags(index)[first];
        for (uint64_t i = 0; i < P2PKV_INDEX_WAYS; i++) {
            if (atomic_load_explicit(&tags[i], memory_order_acquire) != key->hash)
                continue;
            int found = read_slot(index, first + i, key, entry);
            if (found > 0)
                return 1;
            if (found < 0)
                result = -1;
        }
    }
    return result;
}

/* What stands in the first {...} of a key, or all of it; an empty or unclosed one does not count. */
static const uint8_t *routed(const uint8_t *key, size_t *n) {
    const uint8_t *open = memchr(key, '{', *n);
    const uint8_t *close = open ? memchr(open, '}', (size_t)(key + *n - open)) : NULL;
    if (close == NULL || close == open + 1)
        return key;
    *n = (size_t)(close - open - 1);
    return open + 1;
}

uint32_t p2pkv_bucket_of(const void *key, size_t bytes, uint32_t buckets) {
    const uint8_t *part = routed(key, &bytes);
    return (uint32_t)p2pkv_hash(part, bytes) & (buckets - 1);
}

/* The key cannot have been there all the time: a slot that was not left, or written in place, would
 * have been seen. An object that is left out is counted before anybody is told of it, and one that is
 * in the index stays there until it leaves. So without such when this begins there was a moment
 * without the key, and as nobody closed the gate, the node spoke for the bucket then. */
int p2pkv_index_absent(const struct p2pkv_index *index, const struct p2pkv_key *key,
                       struct p2pkv_entry *entry) {
    struct p2pkv_entry other;
    uint32_t bucket = p2pkv_bucket_of(key->word, key->bytes, index->buckets);
    if (bucket >= index->buckets)
        return 0;
    const struct p2pkv_gate *gate = &p2pkv_gates(index)[bucket];
    uint32_t closings = atomic_load_explicit(&gate->closings, memory_order_acquire);
    entry->serve_until = atomic_load_explicit(&gate->serve_until, memory_order_acquire);
    entry->expires_at = 0;
    if (entry->serve_until == 0 ||
        atomic_load_explicit(&gate->unpublished, memory_order_acquire) ||
        atomic_load_explicit(&index->broken, memory_order_acquire))
        return 0;
    if (p2pkv_index_find(index, key, &other) != 0)
        return 0;
    atomic_thread_fence(memory_order_acquire);
    return READ(&gate->closings) == closings;
}

int p2pkv_entry_unchanged(const struct p2pkv_entry *entry, const void *arena) {
    struct p2pkv_value_header header;
    atomic_thread_fence(memory_order_acquire);
    memcpy(&header, (const char *)arena + entry->offset - P2PKV_VALUE_HEADER, sizeof(header));
    return header.magic == P2PKV_VALUE_MAGIC && header.state == P2PKV_VALUE_COMMITTED &&
           header.version == entry->version && header.size == entry->size;
}

void p2pkv_index_use(const struct p2pkv_index *index, const struct p2pkv_entry *entry) {
    struct p2pkv_slot *slot = &p2pkv_slots(index)[entry->slot];
    if (!READ(&slot->used)) /* so that a hot slot's line is not passed around */
        WRITE(&slot->used, 1);
}

/* -- holding */

static _Atomic uint32_t *hold_of(const struct p2pkv_index *index, uint64_t offset) {
    return &p2pkv_holds(index)[mix(offset) % P2PKV_INDEX_HOLDS];
}

/* Either this sees that the object was withdrawn, or the writer, who looks after that, sees the
 * hold: both do their write, then their read, in one order for all. */
int p2pkv_index_hold(const struct p2pkv_index *index, const struct p2pkv_entry *entry) {
    atomic_fetch_add_explicit(hold_of(index, entry->offset), 1, memory_order_seq_cst);
    atomic_thread_fence(memory_order_seq_cst);
    if (READ(&p2pkv_slots(index)[entry->slot].seq) == entry->seq)
        return 1;
    p2pkv_index_let_go(index, entry->offset);
    return 0;
}

void p2pkv_index_let_go(const struct p2pkv_index *index, uint64_t offset) {
    atomic_fetch_sub_explicit(hold_of(index, offset), 1, memory_order_release);
}

int p2pkv_index_held(const struct p2pkv_index *index, uint64_t offset) {
    atomic_thread_fence(memory_order_seq_cst);
    return atomic_load_explicit(hold_of(index, offset), memory_order_acquire) != 0;
}

/* -- writing */

static uint64_t find_own(const struct p2pkv_index *index, const struct p2pkv_key *key) {
    for (int which = 0; which < 2; which++) {
        uint64_t first = group_of(index, key->hash, which) * P2PKV_INDEX_WAYS;
        for (uint64_t i = first; i < first + P2PKV_INDEX_WAYS; i++)
            if (READ(&p2pkv_tags(index)[i]) == key->hash && same_key(&p2pkv_slots(index)[i], key))
                return i;
    }
    return NO_SLOT;
}

/* A free slot in the emptier of both groups. */
static uint64_t find_free(const struct p2pkv_index *index, uint64_t hash) {
    uint64_t best = NO_SLOT;
    int most = 0;
    for (int which = 0; which < 2; which++) {
        uint64_t first = group_of(index, hash, which) * P2PKV_INDEX_WAYS, candidate = NO_SLOT;
        int free = 0;
        for (uint64_t i = first; i < first + P2PKV_INDEX_WAYS; i++)
            if (READ(&p2pkv_tags(index)[i]) == 0)
                candidate = i, free++;
        if (free > most)
            best = candidate, most = free;
    }
    return best;
}

void p2pkv_index_prefetch_free(const struct p2pkv_index *index, const struct p2pkv_key *key) {
    uint64_t at = find_free(index, key->hash);
    const char *slot = (const char *)&p2pkv_slots(index)[at == NO_SLOT ? 0 : at];
    for (int line = 0; line < 3; line++)
        __builtin_prefetch(slot + line * LINE, 1);
}

static void begin_write(struct p2pkv_slot *slot) {
    WRITE(&slot->seq, READ(&slot->seq) + 1);
    atomic_thread_fence(memory_order_release);
}

static void end_write(struct p2pkv_slot *slot) {
    atomic_store_explicit(&slot->seq, READ(&slot->seq) + 1, memory_order_release);
}

int64_t p2pkv_index_publish(struct p2pkv_index *index, const struct p2pkv_key *key,
                            const struct p2pkv_entry *entry) {
    uint64_t at = find_own(index, key);
    int is_new = at == NO_SLOT;
    if (is_new && (at = find_free(index, key->hash)) == NO_SLOT)
        return -1;
    struct p2pkv_slot *slot = &p2pkv_slots(index)[at];
    begin_write(slot);
    WRITE(&slot->bucket, entry->bucket);
    WRITE(&slot->offset, entry->offset);
    WRITE(&slot->size, entry->size);
    WRITE(&slot->version, entry->version);
    WRITE(&slot->expires_at, entry->expires_at);
    WRITE(&slot->flags, entry->flags);
    WRITE(&slot->used, 0);
    if (is_new) {
        WRITE(&slot->key_bytes, key->bytes);
        for (uint32_t i = 0; i < P2PKV_INDEX_KEY_WORDS; i++)
            WRITE(&slot->key[i], i < key->words ? key->word[i] : 0);
    }
    end_write(slot);
    if (is_new) {
        atomic_store_explicit(&p2pkv_tags(index)[at], key->hash, memory_order_release);
        WRITE(&index->published, READ(&index->published) + 1);
    }
    return (int64_t)at;
}

int p2pkv_index_withdraw(struct p2pkv_index *index, uint64_t at, uint64_t version) {
    if (at >= index->groups * P2PKV_INDEX_WAYS)
        return 0;
    struct p2pkv_slot *slot = &p2pkv_slots(index)[at];
    if (READ(&slot->version) != version || READ(&slot->key_bytes) == 0)
        return 0;
    begin_write(slot);
    WRITE(&slot->key_bytes, 0);
    WRITE(&slot->version, 0);
    end_write(slot);
    atomic_store_explicit(&p2pkv_tags(index)[at], 0, memory_order_release);
    WRITE(&index->published, READ(&index->published) - 1);
    return 1;
}

void p2pkv_index_recount(struct p2pkv_index *index, uint32_t bucket, int64_t before, int64_t now) {
    int refused = (now == P2PKV_SLOT_REFUSED) - (before == P2PKV_SLOT_REFUSED);
    int all = refused + (now == P2PKV_SLOT_UNFIT) - (before == P2PKV_SLOT_UNFIT);
    if (bucket >= index->buckets)
        return;
    if (refused) {
        _Atomic uint32_t *count = &p2pkv_gates(index)[bucket].unpublished;
        atomic_store_explicit(count, READ(count) + (uint32_t)refused, memory_order_seq_cst);
    }
    atomic_fetch_add_explicit(&index->refused, (uint64_t)(int64_t)all, memory_order_relaxed);
}

/* -- gates */

void p2pkv_index_open_gates(uintptr_t memory, uintptr_t untils, uint32_t first, uint32_t count) {
    struct p2pkv_index *index = (void *)memory;
    const uint64_t *until = (const void *)untils;
    for (uint32_t i = 0; i < count && first + i < index->buckets; i++)
        atomic_store_explicit(&p2pkv_gates(index)[first + i].serve_until, until[i],
                              memory_order_release);
}

void p2pkv_index_close_gate(uintptr_t memory, uint32_t bucket) {
    struct p2pkv_index *index = (void *)memory;
    if (bucket >= index->buckets)
        return;
    struct p2pkv_gate *gate = &p2pkv_gates(index)[bucket];
    atomic_store_explicit(&gate->serve_until, 0, memory_order_seq_cst);
    atomic_store_explicit(&gate->closings, READ(&gate->closings) + 1, memory_order_seq_cst);
}
