/* Gather and scatter in memory. */
#include "native.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { MAX_THREADS = 16, LINE = 64, STREAMING_PIECE_MIN = 2048 };

/* Below this share a thread costs more than it copies in the meantime. */
static const uint64_t SHARE_MIN = 4u << 20;

struct share {
    const struct p2pkv_pieces *targets, *sources;
    uint64_t start, bytes;
    int streaming;
};

#if defined(__SSE2__)
/* A plain store reads the line it is about to overwrite; these do not, which is worth up to half of
 * the memory traffic once the target is not in a cache. */
static void copy_streaming(char *target, const char *source, size_t n) {
    size_t head = -(uintptr_t)target & (LINE - 1);
    memcpy(target, source, head);
    target += head, source += head, n -= head;
    for (; n >= LINE; n -= LINE, target += LINE, source += LINE) {
        __m128i a = _mm_loadu_si128((const __m128i *)source);
        __m128i b = _mm_loadu_si128((const __m128i *)(source + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(source + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(source + 48));
        _mm_stream_si128((__m128i *)target, a);
        _mm_stream_si128((__m128i *)(target + 16), b);
        _mm_stream_si128((__m128i *)(target + 32), c);
        _mm_stream_si128((__m128i *)(target + 48), d);
    }
    memcpy(target, source, n);
}

/* Streaming stores are not ordered with those that follow: with the one that says "ready". */
void p2pkv_copy_fence(void) {
    _mm_sfence();
}
#else
static void copy_streaming(char *target, const char *source, size_t n) {
    memcpy(target, source, n);
}

void p2pkv_copy_fence(void) {}
#endif

void p2pkv_copy_run(char *target, const char *source, size_t n, int streaming) {
    if (streaming && n >= STREAMING_PIECE_MIN)
        copy_streaming(target, source, n);
    else
        memcpy(target, source, n);
}

static void copy_share(const struct share *share) {
    struct p2pkv_cursor to = {0, 0}, from = {0, 0};
    p2pkv_advance(share->targets, &to, share->start);
    p2pkv_advance(share->sources, &from, share->start);
    for (uint64_t left = share->bytes; left > 0;) {
        const struct iovec *target = &share->targets->iov[to.index];
        const struct iovec *source = &share->sources->iov[from.index];
        size_t n = target->iov_len - to.offset;
        if (n > source->iov_len - from.offset)
            n = source->iov_len - from.offset;
        if (n > left)
            n = (size_t)left;
        char *into = (char *)target->iov_base + to.offset;
        const char *out_of = (const char *)source->iov_base + from.offset;
        p2pkv_copy_run(into, out_of, n, share->streaming);
        p2pkv_advance(share->targets, &to, n);
        p2pkv_advance(share->sources, &from, n);
        left -= n;
    }
    if (share->streaming)
        p2pkv_copy_fence();
}

static void *copy_thread(void *share) {
    copy_share(share);
    return NULL;
}

/* Shares are cut at whole pages, so that no two threads write to one line of an aligned target. */
static int divide(struct share *shares, const struct share *whole, int threads) {
    uint64_t each = (whole->bytes / (uint64_t)threads + 4095) & ~(uint64_t)4095;
    int n = 0;
    for (uint64_t start = 0; start < whole->bytes; start += each) {
        uint64_t rest = whole->bytes - start;
        shares[n] = *whole;
        shares[n].start = start;
        shares[n].bytes = rest < each ? rest : each;
        n++;
    }
    return n;
}

/* A thread that takes no signals: those are for the interpreter's own threads. */
int p2pkv_thread(pthread_t *made, const pthread_attr_t *attributes, void *(*run)(void *),
                 void *argument) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(made, attributes, run, argument);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* A share whose thread cannot be made is copied here: slower, but done. */
static void copy_by_threads(const struct share *whole, int threads) {
    struct share shares[MAX_THREADS];
    pthread_t made[MAX_THREADS];
    int is_made[MAX_THREADS] = {0};
    int n = divide(shares, whole, threads);
    for (int i = 1; i < n; i++)
        is_made[i] = p2pkv_thread(&made[i], NULL, copy_thread, &shares[i]) == 0;
    copy_share(&shares[0]);
    for (int i = 1; i < n; i++) {
        if (is_made[i])
            pthread_join(made[i], NULL);
        else
            copy_share(&shares[i]);
    }
}

int p2pkv_has_null(const struct p2pkv_pieces *pieces) {
    for (size_t i = 0; i < pieces->count; i++)
        if (pieces->iov[i].iov_base == NULL && pieces->iov[i].iov_len > 0)
            return 1;
    return 0;
}

static int useful_threads(uint64_t bytes, int threads) {
    uint64_t most = bytes / SHARE_MIN;
    if (threads > MAX_THREADS)
        threads = MAX_THREADS;
    return (uint64_t)threads < most ? threads : (int)most;
}

int p2pkv_copy(uintptr_t targets, uintptr_t sources, int threads, uint64_t streaming_min) {
    const struct p2pkv_pieces *to = (const void *)targets, *from = (const void *)sources;
    if (to->bytes != from->bytes)
        return EINVAL;
    if (p2pkv_has_null(to) || p2pkv_has_null(from))
        return EFAULT;
    struct share whole = {to, from, 0, to->bytes, to->bytes >= streaming_min};
    threads = useful_threads(whole.bytes, threads);
    if (threads > 1)
        copy_by_threads(&whole, threads);
    else
        copy_share(&whole);
    return 0;
}
