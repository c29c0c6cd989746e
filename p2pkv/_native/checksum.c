/*
 * XXH3 of 64 bits, as specified in the xxHash project's doc/xxhash_spec.md. Values have
 * seed 0; keys, which are short, any.
 *
 * Values of more than 240 bytes go through eight accumulators, 64 bytes (a stripe) at a time. Sixteen
 * stripes are a block, after which the accumulators are scrambled. The last 64 bytes are a stripe of
 * their own that may overlap the one before, so a stripe is taken only once a byte follows it.
 */
#include "native.h"

#include <errno.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum {
    STRIPE = 64,
    BLOCK_STRIPES = 16,
    SECRET = 192,
    SCRAMBLE_AT = SECRET - STRIPE,
    LAST_AT = SECRET - STRIPE - 7,
    MERGE_AT = 11,
    AHEAD = 512,     /* bytes before they are needed, memory is asked for them */
    CHUNK = 8 << 10 /* copied while it is in a core's first cache */
};

static const uint64_t PRIME32_1 = 0x9E3779B1, PRIME32_2 = 0x85EBCA77, PRIME32_3 = 0xC2B2AE3D;
static const uint64_t PRIME64_1 = 0x9E3779B185EBCA87, PRIME64_2 = 0xC2B2AE3D27D4EB4F,
                      PRIME64_3 = 0x165667B19E3779F9, PRIME64_4 = 0x85EBCA77C2B2AE63,
                      PRIME64_5 = 0x27D4EB2F165667C5;
static const uint64_t PRIME_MX1 = 0x165667919E3779F9, PRIME_MX2 = 0x9FB21C651E98DF25;

static const uint8_t secret[SECRET] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

/* A value on its way through the accumulators. */
struct state {
    uint64_t lanes[8];
    size_t stripe;         /* of the block */
    size_t held;           /* bytes that wait for what follows them: 1 to 64 after the first */
    uint8_t wait[STRIPE];
    uint8_t last[STRIPE]; /* the stripe before */
};

static uint32_t load_u32(const uint8_t *p) {
    uint32_t word;
    memcpy(&word, p, sizeof word);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap32(word);
#endif
    return word;
}

static uint64_t load_u64(const uint8_t *p) {
    uint64_t word;
    memcpy(&word, p, sizeof word);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    return word;
}

static uint64_t rotated(uint64_t x, int by) {
    return x << by | x >> (64 - by);
}

/* Both halves of the product of 128 bits, one over the other. */
static uint64_t folded(uint64_t a, uint64_t b) {
    unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static uint64_t avalanche(uint64_t hash) {
    hash = (hash ^ hash >> 37) * PRIME_MX1;
    return hash ^ hash >> 32;
}

static uint64_t avalanche_xxh64(uint64_t hash) {
    hash = (hash ^ hash >> 33) * PRIME64_2;
    hash = (hash ^ hash >> 29) * PRIME64_3;
    return hash ^ hash >> 32;
}

/* -- up to 240 bytes */

static uint64_t mixed_16(const uint8_t *p, const uint8_t *key, uint64_t seed) {
    return folded(load_u64(p) ^ (load_u64(key) + seed),
                  load_u64(p + 8) ^ (load_u64(key + 8) - seed));
}

static uint64_t of_0_to_16(const uint8_t *p, size_t n, uint64_t seed) {
    if (n > 8) {
        uint64_t low = load_u64(p) ^ ((load_u64(secret + 24) ^ load_u64(secret + 32)) + seed);
        uint64_t high = load_u64(p + n - 8) ^ ((load_u64(secret + 40) ^ load_u64(secret + 48)) - seed);
        return avalanche(n + __builtin_bswap64(low) + high + folded(low, high));
    }
    if (n >= 4) {
        uint64_t both = load_u32(p + n - 4) + ((uint64_t)load_u32(p) << 32);
        seed ^= (uint64_t)__builtin_bswap32((uint32_t)seed) << 32;
        uint64_t hash = both ^ ((load_u64(secret + 8) ^ load_u64(secret + 16)) - seed);
        hash = (hash ^ rotated(hash, 49) ^ rotated(hash, 24)) * PRIME_MX2;
        hash = (hash ^ ((hash >> 35) + n)) * PRIME_MX2;
        return hash ^ hash >> 28;
    }
    if (n > 0) {
        uint32_t all = (uint32_t)p[0] << 16 | (uint32_t)p[n >> 1] << 24 | p[n - 1] | (uint32_t)n << 8;
        return avalanche_xxh64(all ^ ((uint64_t)(load_u32(secret) ^ load_u32(secret + 4)) + seed));
    }
    return avalanche_xxh64(seed ^ load_u64(secret + 56) ^ load_u64(secret + 64));
}

static uint64_t of_17_to_128(const uint8_t *p, size_t n, uint64_t seed) {
    uint64_t hash = n * PRIME64_1;
    for (size_t i = (n - 1) / 32 + 1; i-- > 0;) {
        hash += mixed_16(p + 16 * i, secret + 32 * i, seed);
        hash += mixed_16(p + n - 16 * (i + 1), secret + 32 * i + 16, seed);
    }
    return avalanche(hash);
}

static uint64_t of_129_to_240(const uint8_t *p, size_t n, uint64_t seed) {
    uint64_t hash = n * PRIME64_1;
    for (size_t i = 0; i < 8; i++)
        hash += mixed_16(p + 16 * i, secret + 16 * i, seed);
    hash = avalanche(hash);
    for (size_t i = 8; i < n / 16; i++)
        hash += mixed_16(p + 16 * i, secret + 16 * (i - 8) + 3, seed);
    return avalanche(hash + mixed_16(p + n - 16, secret + 136 - 17, seed));
}

uint64_t p2pkv_hash_short(const void *bytes, size_t n, uint64_t seed) {
    const uint8_t *p = bytes;
    return n <= 16    ? of_0_to_16(p, n, seed)
           : n <= 128 ? of_17_to_128(p, n, seed)
                      : of_129_to_240(p, n, seed);
}

/* -- longer ones: stripes, then the scrambling at the end of a block */

static void take_portable(uint64_t lanes[8], const uint8_t *p, const uint8_t *key, size_t stripes) {
    for (; stripes > 0; stripes--, p += STRIPE, key += 8)
        for (int i = 0; i < 8; i++) {
            uint64_t word = load_u64(p + 8 * i), keyed = word ^ load_u64(key + 8 * i);
            lanes[i ^ 1] += word;
            lanes[i] += (keyed & 0xffffffff) * (keyed >> 32);
        }
}

static void scramble(uint64_t lanes[8]) {
    for (int i = 0; i < 8; i++)
        lanes[i] = (lanes[i] ^ lanes[i] >> 47 ^ load_u64(secret + SCRAMBLE_AT + 8 * i)) * PRIME32_1;
}

#if defined(__x86_64__)
static void take_sse2(uint64_t lanes[8], const uint8_t *p, const uint8_t *key, size_t stripes) {
    __m128i sum[4];
    memcpy(sum, lanes, sizeof sum);
    for (; stripes > 0; stripes--, p += STRIPE, key += 8)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            __m128i word = _mm_loadu_si128((const __m128i *)p + i);
            __m128i keyed = _mm_xor_si128(word, _mm_loadu_si128((const __m128i *)key + i));
            __m128i product = _mm_mul_epu32(keyed, _mm_srli_epi64(keyed, 32));
            __m128i swapped = _mm_shuffle_epi32(word, _MM_SHUFFLE(1, 0, 3, 2));
            sum[i] = _mm_add_epi64(sum[i], _mm_add_epi64(product, swapped));
        }
    memcpy(lanes, sum, sizeof sum);
}

__attribute__((target("avx2"))) static void take_avx2(uint64_t lanes[8], const uint8_t *p,
                                                      const uint8_t *key, size_t stripes) {
    __m256i sum[2];
    memcpy(sum, lanes, sizeof sum);
#pragma GCC unroll 4
    for (; stripes > 0; stripes--, p += STRIPE, key += 8) {
        _mm_prefetch((const char *)p + AHEAD, _MM_HINT_T0);
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            __m256i word = _mm256_loadu_si256((const __m256i *)p + i);
            __m256i keyed = _mm256_xor_si256(word, _mm256_loadu_si256((const __m256i *)key + i));
            __m256i product = _mm256_mul_epu32(keyed, _mm256_srli_epi64(keyed, 32));
            __m256i swapped = _mm256_shuffle_epi32(word, _MM_SHUFFLE(1, 0, 3, 2));
            sum[i] = _mm256_add_epi64(sum[i], _mm256_add_epi64(product, swapped));
        }
    }
    memcpy(lanes, sum, sizeof sum);
}
#endif

typedef void taker(uint64_t lanes[8], const uint8_t *p, const uint8_t *key, size_t stripes);

static taker *find_taker(int portable) {
    if (portable)
        return take_portable;
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") ? take_avx2 : take_sse2;
#else
    return take_portable;
#endif
}

static void begin(struct state *state) {
    const uint64_t lanes[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                               PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};
    memcpy(state->lanes, lanes, sizeof lanes);
    state->stripe = state->held = 0;
}

static void take_stripes(struct state *state, taker *take, const uint8_t *p, size_t stripes) {
    memcpy(state->last, p + (stripes - 1) * STRIPE, STRIPE);
    while (stripes > 0) {
        size_t n = BLOCK_STRIPES - state->stripe;
        n = n < stripes ? n : stripes;
        take(state->lanes, p, secret + 8 * state->stripe, n);
        p += n * STRIPE, stripes -= n, state->stripe += n;
        if (state->stripe == BLOCK_STRIPES) {
            scramble(state->lanes);
            state->stripe = 0;
        }
    }
}

static void feed(struct state *state, taker *take, const uint8_t *p, size_t n) {
    while (n > 0) {
        if (state->held == STRIPE) {
            take_stripes(state, take, state->wait, 1);
            state->held = 0;
        }
        size_t used;
        if (state->held == 0 && n > STRIPE) {
            size_t stripes = (n - 1) / STRIPE;
            take_stripes(state, take, p, stripes);
            used = stripes * STRIPE;
        } else {
            used = STRIPE - state->held;
            used = used < n ? used : n;
            memcpy(state->wait + state->held, p, used);
            state->held += used;
        }
        p += used, n -= used;
    }
}

static uint64_t finish(struct state *state, uint64_t bytes) {
    uint8_t stripe[STRIPE];
    memcpy(stripe, state->last + state->held, STRIPE - state->held);
    memcpy(stripe + STRIPE - state->held, state->wait, state->held);
    take_portable(state->lanes, stripe, secret + LAST_AT, 1);
    uint64_t hash = bytes * PRIME64_1;
    for (int i = 0; i < 8; i += 2)
        hash += folded(state->lanes[i] ^ load_u64(secret + MERGE_AT + 8 * i),
                       state->lanes[i + 1] ^ load_u64(secret + MERGE_AT + 8 * (i + 1)));
    return avalanche(hash);
}

uint64_t p2pkv_hash(const uint8_t *bytes, size_t n) {
    struct state state;
    if (n <= P2PKV_HASH_SHORT_MAX)
        return p2pkv_hash_short(bytes, n, 0);
    begin(&state);
    feed(&state, find_taker(0), bytes, n);
    return finish(&state, n);
}

/* -- batches */

static int is_total(const uint64_t *sizes, size_t n, uint64_t bytes) {
    for (size_t i = 0; i < n; i++) {
        if (sizes[i] > bytes)
            return 0;
        bytes -= sizes[i];
    }
    return bytes == 0;
}

/* The bytes that lie together from here on, at most `most`. */
static uint8_t *run_at(const struct p2pkv_pieces *pieces, const struct p2pkv_cursor *at,
                       uint64_t most, size_t *n) {
    const struct iovec *piece = &pieces->iov[at->index];
    size_t left = piece->iov_len - at->offset;
    *n = left < most ? left : (size_t)most;
    return (uint8_t *)piece->iov_base + at->offset;
}

/* One value: from `from` on, and to `to` if that is not null. */
struct copying {
    const struct p2pkv_pieces *from, *to;
    struct p2pkv_cursor at, into;
    taker *take;
    int streaming;
};

static uint64_t one_value(struct copying *copying, uint64_t size) {
    struct state state;
    uint8_t together[P2PKV_HASH_SHORT_MAX];
    size_t run, done = 0;
    begin(&state);
    for (uint64_t left = size; left > 0; left -= run) {
        uint64_t most = copying->to != NULL && left > CHUNK ? CHUNK : left;
        const uint8_t *source = run_at(copying->from, &copying->at, most, &run);
        uint8_t *target = NULL;
        if (copying->to != NULL)
            target = run_at(copying->to, &copying->into, run, &run);
        if (size <= P2PKV_HASH_SHORT_MAX)
            memcpy(together + done, source, run);
        else
            feed(&state, copying->take, source, run);
        if (target != NULL) {
            p2pkv_copy_run((char *)target, (const char *)source, run, copying->streaming);
            p2pkv_advance(copying->to, &copying->into, run);
        }
        p2pkv_advance(copying->from, &copying->at, run);
        done += run;
    }
    return size <= P2PKV_HASH_SHORT_MAX ? p2pkv_hash_short(together, (size_t)size, 0) : finish(&state, size);
}

static void all_values(struct copying *copying, const uint64_t *sizes, size_t n, uint64_t *sums) {
    p2pkv_advance(copying->from, &copying->at, 0);
    if (copying->to != NULL)
        p2pkv_advance(copying->to, &copying->into, 0);
    for (size_t i = 0; i < n; i++)
        sums[i] = one_value(copying, sizes[i]);
}

int p2pkv_checksums(uintptr_t values, const uint64_t *sizes, size_t n, uint64_t *sums,
                    int portable) {
    const struct p2pkv_pieces *from = (const void *)values;
    if (!is_total(sizes, n, from->bytes))
        return EINVAL;
    if (p2pkv_has_null(from))
        return EFAULT;
    struct copying copying = {.from = from, .take = find_taker(portable)};
    all_values(&copying, sizes, n, sums);
    return 0;
}

int p2pkv_copy_checksums(uintptr_t targets, uintptr_t sources, const uint64_t *sizes, size_t n,
                         uint64_t *sums, uint64_t streaming_min) {
    const struct p2pkv_pieces *to = (const void *)targets, *from = (const void *)sources;
    if (to->bytes != from->bytes || !is_total(sizes, n, from->bytes))
        return EINVAL;
    if (p2pkv_has_null(to) || p2pkv_has_null(from))
        return EFAULT;
    struct copying copying = {.from = from, .to = to, .take = find_taker(0),
                              .streaming = from->bytes >= streaming_min};
    all_values(&copying, sizes, n, sums);
    if (copying.streaming)
        p2pkv_copy_fence();
    return 0;
}
