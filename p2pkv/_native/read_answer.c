/* Requests of read connections answered from the published index. */
#include "read_server.h"

#include <stdlib.h>
#include <string.h>

enum { AHEAD = 8 }; /* keys whose place in the index is fetched while others are looked up */

/* -- replies */

int read_reply_make(struct reply *reply, uint8_t **head) {
    *head = malloc(READ_REPLY + 8 * READ_KEYS_MAX);
    reply->iov = malloc((1 + READ_KEYS_MAX) * sizeof *reply->iov);
    reply->holds = malloc(READ_KEYS_MAX * sizeof *reply->holds);
    return *head != NULL && reply->iov != NULL && reply->holds != NULL;
}

void read_reply_free(struct reply *reply, uint8_t *head) {
    free(head);
    free(reply->iov);
    free(reply->holds);
}

void read_reply_advance(struct reply *reply, uint64_t sent) {
    reply->left -= sent;
    while (reply->pieces > 0 && sent >= reply->iov->iov_len) {
        sent -= reply->iov->iov_len;
        reply->iov++, reply->pieces--;
    }
    if (sent > 0) {
        reply->iov->iov_base = (uint8_t *)reply->iov->iov_base + sent;
        reply->iov->iov_len -= sent;
    }
}

/* Bytes of the first piece that are no value's, and so belong to nobody who holds them. */
static size_t own_bytes(const struct reply *reply) {
    return reply->pieces > reply->held ? reply->iov->iov_len : 0;
}

struct reply *read_reply_keep(const struct reply *reply) {
    size_t own = own_bytes(reply);
    size_t iov = reply->pieces * sizeof *reply->iov, holds = reply->held * sizeof *reply->holds;
    struct reply *kept = malloc(sizeof *kept + iov + holds + own);
    if (kept == NULL)
        return NULL;
    *kept = *reply;
    kept->iov = (void *)(kept + 1);
    kept->holds = (void *)((uint8_t *)kept->iov + iov);
    memcpy(kept->iov, reply->iov, iov);
    memcpy(kept->holds, reply->holds, holds);
    if (own > 0) {
        kept->iov->iov_base = (uint8_t *)kept->holds + holds;
        memcpy(kept->iov->iov_base, reply->iov->iov_base, own);
    }
    return kept;
}

void read_reply_end(const struct read_server *server, struct reply *reply) {
    for (size_t i = 0; i < reply->held; i++)
        p2pkv_index_let_go(server->index, reply->holds[i]);
    reply->held = reply->pieces = 0;
    reply->left = 0;
}

/* -- looking up */

/* What a batch of keys is looked up with: `next` is the first that is not prepared. */
struct lookup {
    const struct p2pkv_index *index;
    const struct read_request *request;
    const uint8_t *at;
    size_t next;
    struct p2pkv_key keys[AHEAD];
    int fits[AHEAD];
};

static void prepare(struct lookup *lookup) {
    size_t i = lookup->next++, length = read_key_length(lookup->request, i);
    struct p2pkv_key *key = &lookup->keys[i % AHEAD];
    if ((lookup->fits[i % AHEAD] = p2pkv_key_set(key, lookup->at, length)))
        p2pkv_index_prefetch(lookup->index, key);
    lookup->at += length;
}

static struct lookup begin(const struct p2pkv_index *index, const struct read_request *request) {
    struct lookup lookup = {.index = index, .request = request, .at = request->keys};
    while (lookup.next < AHEAD && lookup.next < request->count)
        prepare(&lookup);
    return lookup;
}

enum told { THERE, ABSENT, ASK };

/* Key `i`, which is the one after that of the call before. */
static enum told find(struct lookup *lookup, size_t i, struct p2pkv_entry *entry) {
    const struct p2pkv_key *key = &lookup->keys[i % AHEAD];
    enum told told = ASK;
    if (lookup->fits[i % AHEAD]) {
        if (p2pkv_index_find(lookup->index, key, entry) > 0)
            told = THERE;
        else if (p2pkv_index_absent(lookup->index, key, entry))
            told = ABSENT;
    }
    if (lookup->next < lookup->request->count)
        prepare(lookup);
    return told;
}

/* -- answering */

/* What holds when a request has been looked up. One that was found was there at a moment after
 * `began`, one that was absent was not; it may be told if `until`, the first end of a gate or a value among all, has not come
 * when everything is looked up. So a process that was stopped in between serves nothing. */
struct moment {
    uint64_t began, until;
};

static struct moment begin_moment(const struct read_server *server) {
    return (struct moment){p2pkv_index_now(server->index), UINT64_MAX};
}

/* What is told of a key, from when on `until` has to be minded. */
static enum told look(struct lookup *lookup, size_t i, struct moment *moment,
                      struct p2pkv_entry *entry) {
    enum told told = find(lookup, i, entry);
    if (told == ASK || !p2pkv_entry_fresh(entry, moment->began))
        return ASK;
    if (entry->serve_until < moment->until)
        moment->until = entry->serve_until;
    if (entry->expires_at && entry->expires_at < moment->until)
        moment->until = entry->expires_at;
    return told;
}

static int still_fresh(const struct read_server *server, const struct moment *moment) {
    uint64_t now = p2pkv_index_now(server->index);
    return now && now < moment->until;
}

/* How many keys of a request were told what. */
typedef size_t tally[ASK + 1];

static void note(struct read_server *server, const struct read_request *request,
                 const tally told, uint64_t payload) {
    struct figures *figures = &server->figures;
    int values = request->kind == READ_GET;
    count(&figures->requests, 1);
    count(values ? &figures->values : &figures->flags, told[THERE]);
    count(values ? &figures->misses : &figures->absent, told[ABSENT]);
    count(&figures->asks, told[ASK]);
    count(&figures->bytes, payload);
}

static int within(const struct read_server *server, const struct p2pkv_entry *entry) {
    return entry->offset <= server->arena_bytes &&
           entry->size <= server->arena_bytes - entry->offset;
}

/* Holds a value and adds it to the reply. */
static int add_value(const struct read_server *server, struct reply *reply, uint64_t payload,
                     const struct p2pkv_entry *entry) {
    if (!within(server, entry) || entry->size > server->payload_max - payload ||
        !p2pkv_index_hold(server->index, entry))
        return 0;
    p2pkv_index_use(server->index, entry);
    reply->holds[reply->held++] = entry->offset;
    reply->iov[reply->pieces++] =
        (struct iovec){(void *)(uintptr_t)(server->arena + entry->offset), entry->size};
    return 1;
}

static void put_match(uint8_t *table, size_t hits, uint32_t next) {
    put_le(table, hits, 4);
    put_le(table + 4, next, 4);
}

/* All of it is for the owner to answer. */
static void give_up(const struct read_server *server, const struct read_request *request,
                    struct reply *reply, uint8_t *table, tally told) {
    for (size_t i = 0; i < reply->held; i++)
        p2pkv_index_let_go(server->index, reply->holds[i]);
    reply->held = 0, reply->pieces = 1;
    told[ASK] += told[THERE] + told[ABSENT];
    told[THERE] = told[ABSENT] = 0;
    if (request->kind == READ_MATCH)
        put_match(table, 0, READ_ASK_BYTE);
    else
        memset(table, READ_ASK_BYTE, read_table(request->kind, request->count));
}

static uint64_t answer_get(const struct read_server *server, const struct read_request *request,
                           struct moment *moment, struct reply *reply, uint8_t *table,
                           tally told) {
    struct lookup lookup = begin(server->index, request);
    uint64_t payload = 0;
    for (size_t i = 0; i < request->count; i++) {
        struct p2pkv_entry entry;
        enum told of_this = look(&lookup, i, moment, &entry);
        if (of_this == THERE && !add_value(server, reply, payload, &entry))
            of_this = ASK;
        uint64_t size = of_this == THERE ? entry.size : of_this == ABSENT ? READ_MISS : READ_ASK;
        put_le(table + 8 * i, size, 8);
        payload += of_this == THERE ? entry.size : 0;
        told[of_this]++;
    }
    return payload;
}

static void answer_exists(const struct read_server *server, const struct read_request *request,
                          struct moment *moment, uint8_t *table, tally told) {
    static const uint8_t bytes[] = {[THERE] = 0, [ABSENT] = READ_MISS_BYTE, [ASK] = READ_ASK_BYTE};
    struct lookup lookup = begin(server->index, request);
    struct p2pkv_entry entry;
    for (size_t i = 0; i < request->count; i++) {
        enum told of_this = look(&lookup, i, moment, &entry);
        table[i] = bytes[of_this];
        told[of_this]++;
    }
}

/* Keys behind the first that is not there, or is to be asked for, are not looked up. */
static void answer_match(const struct read_server *server, const struct read_request *request,
                         struct moment *moment, uint8_t *table, tally told) {
    struct lookup lookup = begin(server->index, request);
    struct p2pkv_entry entry;
    enum told of_this = THERE;
    for (size_t i = 0; i < request->count && of_this == THERE; i++) {
        of_this = look(&lookup, i, moment, &entry);
        told[of_this]++;
    }
    uint32_t next = told[ABSENT] ? READ_MISS_BYTE : told[ASK] ? READ_ASK_BYTE : 0;
    put_match(table, told[THERE], next);
}

static void write_head(const struct read_request *request, uint8_t *head, uint64_t payload) {
    put_le(head, request->count, 4);
    head[4] = READ_VERSION, head[5] = (uint8_t)request->kind, head[6] = head[7] = 0;
    put_le(head + 8, request->id, 4);
    put_le(head + 12, 0, 4);
    put_le(head + 16, payload, 8);
}

void read_answer(struct read_server *server, const struct read_request *request,
                 struct reply *reply, uint8_t *head) {
    uint8_t *table = head + READ_REPLY;
    size_t size = READ_REPLY + read_table(request->kind, request->count);
    uint64_t payload = 0;
    tally told = {0};
    struct moment moment = begin_moment(server);
    reply->iov[0] = (struct iovec){head, size};
    reply->pieces = 1, reply->held = 0;
    if (request->kind == READ_GET)
        payload = answer_get(server, request, &moment, reply, table, told);
    else if (request->kind == READ_EXISTS)
        answer_exists(server, request, &moment, table, told);
    else
        answer_match(server, request, &moment, table, told);
    if (!still_fresh(server, &moment)) {
        give_up(server, request, reply, table, told);
        payload = 0;
    }
    write_head(request, head, payload);
    reply->left = size + payload;
    note(server, request, told, payload);
}
