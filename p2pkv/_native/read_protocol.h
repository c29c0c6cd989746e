#ifndef P2PKV_READ_PROTOCOL_H
#define P2PKV_READ_PROTOCOL_H

/*
 * Reads without the owner's Python: the messages of a read connection. All numbers are little-endian.
 *
 *   preface   "P2KVREAD" · version u8 · 7 zeros · token (16 bytes)                     client, once
 *   request   body bytes u32 · version u8 · kind u8 · zero u16 · keys u32 · id u32, then the body:
 *             length u16 of each key, then the keys back to back
 *   reply     keys u32 · version u8 · kind u8 · zero u16 · id u32 · zero u32 · payload bytes u64,
 *             then a table, then the payload
 *             GET: size u64 of each value, MISS or ASK; the payload is the values, back to back
 *             EXISTS: one byte for each key: 0 it is there, MISS_BYTE or ASK_BYTE; no payload
 *             MATCH: u32 how many keys from the start are there, u32 0 or MISS_BYTE or ASK_BYTE:
 *             what is told of the next one; no payload
 *
 * MISS: it is not there. ASK: the index does not answer that, the owner does. Replies come in the order of the requests. A
 * peer that says anything else is not answered: the connection is closed.
 */
#include <stddef.h>
#include <stdint.h>

#define P2PKV_READ_MAGIC "P2KVREAD"

enum {
    READ_VERSION = 2,
    READ_PREFACE = 32,
    READ_TOKEN = 16, /* bytes of the token, at the end of the preface */
    READ_REQUEST = 16,
    READ_REPLY = 24,
    READ_GET = 1,
    READ_EXISTS = 2,
    READ_MATCH = 3,
    READ_MISS_BYTE = 1,
    READ_ASK_BYTE = 255,
    READ_KEY_MAX = 1024,
    READ_KEYS_MAX = 4096,
    READ_BODY_MAX = READ_KEYS_MAX * (2 + READ_KEY_MAX)
};

#define READ_ASK UINT64_MAX
#define READ_MISS (UINT64_MAX - 1)

struct read_request {
    uint32_t kind, count, id, body;
    const uint8_t *lengths, *keys;
};

static inline void put_le(uint8_t *to, uint64_t value, int n) {
    for (int i = 0; i < n; i++, value >>= 8)
        to[i] = (uint8_t)value;
}

static inline uint64_t get_le(const uint8_t *from, int n) {
    uint64_t value = 0;
    while (n-- > 0)
        value = value << 8 | from[n];
    return value;
}

static inline size_t read_key_length(const struct read_request *request, size_t i) {
    return (size_t)get_le(request->lengths + 2 * i, 2);
}

/* Bytes of the table of a reply. */
static inline size_t read_table(uint32_t kind, size_t count) {
    return kind == READ_GET ? 8 * count : kind == READ_EXISTS ? count : 8;
}

/* The request that `bytes` begin with: how many bytes it takes, 0 if not all of it is there yet, or
 * -1 for what is no request. What it points to is within `bytes`. */
int64_t read_parse(const uint8_t *bytes, size_t have, struct read_request *request);

/* Whether these READ_PREFACE bytes begin a connection that has the token. */
int read_admits(const uint8_t *preface, const uint8_t *token);

#endif
