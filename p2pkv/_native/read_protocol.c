/* What is made of the bytes of a read connection. No state, no system calls. */
#include "read_protocol.h"
#include "native.h"

#include <string.h>

static int parse_head(const uint8_t *bytes, struct read_request *request) {
    request->body = (uint32_t)get_le(bytes, 4);
    request->kind = bytes[5];
    request->count = (uint32_t)get_le(bytes + 8, 4);
    request->id = (uint32_t)get_le(bytes + 12, 4);
    return bytes[4] == READ_VERSION && request->kind >= READ_GET && request->kind <= READ_MATCH &&
           bytes[6] == 0 && bytes[7] == 0 && request->count >= 1 &&
           request->count <= READ_KEYS_MAX && request->body <= READ_BODY_MAX &&
           request->body >= 3 * request->count;
}

/* The lengths are all in range and add up to what the head announces. */
static int check_body(const struct read_request *request) {
    uint64_t total = 2 * (uint64_t)request->count;
    for (size_t i = 0; i < request->count; i++) {
        size_t length = read_key_length(request, i);
        if (length < 1 || length > READ_KEY_MAX)
            return 0;
        total += length;
    }
    return total == request->body;
}

int64_t read_parse(const uint8_t *bytes, size_t have, struct read_request *request) {
    if (have < READ_REQUEST)
        return 0;
    if (!parse_head(bytes, request))
        return -1;
    if (have - READ_REQUEST < request->body)
        return 0;
    request->lengths = bytes + READ_REQUEST;
    request->keys = request->lengths + 2 * (size_t)request->count;
    return check_body(request) ? (int64_t)READ_REQUEST + request->body : -1;
}

/* Takes as long wherever the token differs. */
int read_admits(const uint8_t *preface, const uint8_t *token) {
    static const uint8_t begin[READ_PREFACE - READ_TOKEN] = P2PKV_READ_MAGIC "\x02";
    uint8_t differs = 0;
    for (size_t i = 0; i < READ_TOKEN; i++)
        differs |= preface[sizeof begin + i] ^ token[i];
    return memcmp(preface, begin, sizeof begin) == 0 && differs == 0;
}

int64_t p2pkv_read_parse(const uint8_t *bytes, uint64_t have, uint32_t *kind, uint32_t *count) {
    struct read_request request;
    int64_t taken = read_parse(bytes, (size_t)have, &request);
    if (taken > 0) {
        *kind = request.kind;
        *count = request.count;
    }
    return taken;
}
