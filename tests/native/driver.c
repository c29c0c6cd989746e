/*
 * The C sources without Python, for the sanitizers and their leak detection. Every check that fails
 * names its line; the exit status tells.
 */
#include "index.h"
#include "native.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static int failures;

#define CHECK(condition)                                                       \
    do {                                                                       \
        if (!(condition)) {                                                    \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            failures++;                                                        \
        }                                                                      \
    } while (0)

enum { SECOND = 1000000000, NEVER_STREAMING = 1 << 30 };

static int64_t in_ns(int64_t ns) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * SECOND + t.tv_nsec + ns;
}

static uintptr_t at(const struct p2pkv_pieces *pieces) {
    return (uintptr_t)pieces;
}

/* `bytes` of memory cut into `count` pieces of random lengths, none included, each its own
 * allocation, so that a step over its end is seen. */
static struct p2pkv_pieces *cut(size_t count, size_t bytes, int fill) {
    struct p2pkv_pieces *pieces = malloc(sizeof *pieces + count * sizeof(struct iovec));
    struct iovec *iov = (struct iovec *)(void *)(pieces + 1);
    size_t left = bytes;
    for (size_t i = 0; i < count; i++) {
        size_t n = i + 1 == count ? left : (size_t)rand() % (2 * bytes / count + 1);
        n = n < left ? n : left;
        iov[i] = (struct iovec){malloc(n), n};
        for (size_t k = 0; k < n; k++)
            ((uint8_t *)iov[i].iov_base)[k] = fill ? (uint8_t)rand() : 0;
        left -= n;
    }
    *pieces = (struct p2pkv_pieces){.count = count, .bytes = bytes, .owner = NULL, .iov = iov};
    return pieces;
}

static void drop(struct p2pkv_pieces *pieces) {
    for (size_t i = 0; i < pieces->count; i++)
        free(pieces->iov[i].iov_base);
    free(pieces);
}

static uint8_t *joined(const struct p2pkv_pieces *pieces) {
    uint8_t *all = malloc(pieces->bytes + 1), *to = all;
    for (size_t i = 0; i < pieces->count; i++) {
        memcpy(to, pieces->iov[i].iov_base, pieces->iov[i].iov_len);
        to += pieces->iov[i].iov_len;
    }
    return all;
}

static int same(const struct p2pkv_pieces *a, const struct p2pkv_pieces *b) {
    uint8_t *x = joined(a), *y = joined(b);
    int equal = a->bytes == b->bytes && memcmp(x, y, a->bytes) == 0;
    free(x);
    free(y);
    return equal;
}

static void copies(void) {
    static const size_t sizes[] = {0, 1, 63, 64, 4096, 100003, 9 << 20};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int threads = 1; threads <= 3; threads++)
            for (int streaming = 0; streaming < 2; streaming++) {
                struct p2pkv_pieces *from = cut(1 + (size_t)rand() % 50, sizes[i], 1);
                struct p2pkv_pieces *to = cut(1 + (size_t)rand() % 50, sizes[i], 0);
                uint64_t least = streaming ? 0 : NEVER_STREAMING;
                CHECK(p2pkv_copy(at(to), at(from), threads, least) == 0);
                CHECK(same(to, from));
                drop(from);
                drop(to);
            }
}

static void refused_copies(void) {
    struct iovec null = {NULL, 8};
    struct p2pkv_pieces nowhere = {.count = 1, .bytes = 8, .iov = &null};
    struct p2pkv_pieces *eight = cut(2, 8, 1), *nine = cut(2, 9, 1), *before = cut(1, 8, 0);
    CHECK(p2pkv_copy(at(before), at(eight), 1, NEVER_STREAMING) == 0);
    CHECK(p2pkv_copy(at(eight), at(nine), 1, NEVER_STREAMING) == EINVAL);
    CHECK(p2pkv_copy(at(eight), at(&nowhere), 1, NEVER_STREAMING) == EFAULT);
    CHECK(p2pkv_copy(at(&nowhere), at(eight), 1, NEVER_STREAMING) == EFAULT);
    CHECK(same(before, eight));
    drop(eight);
    drop(nine);
    drop(before);
}

static void pair(int fds[2], int non_blocking) {
    int small = 4096;
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds) == 0);
    for (int i = 0; i < 2; i++) {
        setsockopt(fds[i], SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
        setsockopt(fds[i], SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
        if (non_blocking)
            fcntl(fds[i], F_SETFL, fcntl(fds[i], F_GETFL) | O_NONBLOCK);
    }
}

struct sending {
    int fd;
    const struct p2pkv_pieces *pieces;
};

static void *send_everything(void *argument) {
    struct sending *sending = argument;
    p2pkv_transfer sent = {0, EINTR};
    while (sent.error == EINTR)
        sent = p2pkv_send_all(sending->fd, at(sending->pieces), sent.bytes, in_ns(20 * (int64_t)SECOND), 0);
    CHECK(sent.error == 0);
    CHECK(sent.bytes == sending->pieces->bytes);
    return NULL;
}

static p2pkv_transfer receive(int fd, const struct p2pkv_pieces *into, int64_t ns, int64_t spin_ns) {
    p2pkv_transfer got = {0, EINTR};
    int64_t deadline = in_ns(ns);
    while (got.error == EINTR)
        got = p2pkv_recv_all(fd, at(into), got.bytes, deadline, spin_ns);
    return got;
}

static void transfers(void) {
    for (int mode = 0; mode < 4; mode++) {
        int fds[2];
        pthread_t thread;
        pair(fds, mode & 1);
        struct p2pkv_pieces *from = cut(3000, 1 << 18, 1), *to = cut(2000, 1 << 18, 0);
        struct sending sending = {fds[0], from};
        CHECK(pthread_create(&thread, NULL, send_everything, &sending) == 0);
        p2pkv_transfer got = receive(fds[1], to, 20 * (int64_t)SECOND, mode & 2 ? 20000 : 0);
        pthread_join(thread, NULL);
        CHECK(got.error == 0);
        CHECK(got.bytes == to->bytes);
        CHECK(same(to, from));
        drop(from);
        drop(to);
        close(fds[0]);
        close(fds[1]);
    }
}

static void deadlines(void) {
    for (int mode = 0; mode < 2; mode++) {
        int fds[2];
        pair(fds, mode);
        struct p2pkv_pieces *much = cut(5, 1 << 20, 1), *some = cut(3, 100, 0);
        p2pkv_transfer sent = {0, EINTR};
        while (sent.error == EINTR)
            sent = p2pkv_send_all(fds[0], at(much), sent.bytes, in_ns(SECOND / 50), 0);
        CHECK(sent.error == ETIMEDOUT);
        CHECK(sent.bytes > 0 && sent.bytes < much->bytes);
        p2pkv_transfer got = receive(fds[0], some, SECOND / 50, 1000);
        CHECK(got.error == ETIMEDOUT);
        CHECK(got.bytes == 0);
        got = receive(fds[1], some, -1, 0);
        CHECK(got.error == 0); /* what is there needs no time */
        drop(much);
        drop(some);
        close(fds[0]);
        close(fds[1]);
    }
}

static void ends(void) {
    int fds[2];
    pair(fds, 0);
    struct p2pkv_pieces *into = cut(3, 100, 0), *out = cut(1, 7, 1), *none = cut(4, 0, 0);
    CHECK(write(fds[0], "1234567", 7) == 7);
    close(fds[0]);
    p2pkv_transfer got = receive(fds[1], into, SECOND, 0);
    CHECK(got.error == P2PKV_CLOSED);
    CHECK(got.bytes == 7);
    CHECK(p2pkv_recv_some(fds[1], at(into), 0) == -P2PKV_CLOSED);
    CHECK(p2pkv_send_some(fds[1], at(out), 0) == -EPIPE);
    CHECK(p2pkv_recv_some(fds[1], at(none), 0) == 0);
    CHECK(receive(fds[1], none, SECOND, 0).error == 0);
    close(fds[1]);
    CHECK(receive(-1, into, SECOND, 0).error == EBADF);
    drop(into);
    drop(out);
    drop(none);
}

/* One answer with a head of `length` bytes, of which the caller takes up to `room`. */
static void exchange(uint32_t length, size_t room, int expected) {
    int fds[2];
    pair(fds, 0);
    struct p2pkv_pieces *request = cut(3, 50, 1), *head = cut(1, room, 0);
    uint8_t answer[P2PKV_PREFIX + 64] = {(uint8_t)length, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 42};
    p2pkv_exchange state = {0};
    CHECK(write(fds[1], answer, P2PKV_PREFIX + length) == (ssize_t)(P2PKV_PREFIX + length));
    CHECK(p2pkv_call(fds[0], at(request), at(head), &state, in_ns(SECOND), 1000) == expected);
    CHECK(state.sent == 50);
    CHECK(state.head_length == length);
    CHECK(state.payload_length == (uint64_t)1 << 32);
    if (!expected && length)
        CHECK(*(uint8_t *)head->iov->iov_base == 42);
    drop(request);
    drop(head);
    close(fds[0]);
    close(fds[1]);
}

/* All lengths around the steps of the algorithm, cut at random: with and without vectors, alone and
 * while copying, the result is that of the bytes in one piece. */
static void checksums(void) {
    for (size_t size = 0; size < 2200; size += size < 300 ? 1 : 37) {
        struct p2pkv_pieces *whole = cut(1, size, 1), *parts = cut(7, size, 0);
        struct p2pkv_pieces *again = cut(4, size, 0);
        uint64_t length = size, wanted = 0, sum = 0;
        CHECK(p2pkv_checksums(at(whole), &length, 1, &wanted, 1) == 0);
        CHECK(p2pkv_copy_checksums(at(parts), at(whole), &length, 1, &sum, NEVER_STREAMING) == 0);
        CHECK(sum == wanted);
        CHECK(p2pkv_checksums(at(parts), &length, 1, &sum, 0) == 0);
        CHECK(sum == wanted);
        CHECK(p2pkv_copy_checksums(at(again), at(parts), &length, 1, &sum, 0) == 0);
        CHECK(sum == wanted);
        length++;
        CHECK(p2pkv_checksums(at(whole), &length, 1, &sum, 0) == EINVAL);
        drop(whole);
        drop(parts);
        drop(again);
    }
}

/* One writer, which moves an object between two places and clears the one it leaves unless it is
 * held; readers look, hold, and compare. Of another key, which is overwritten all the time and away
 * only while its gate is closed, nobody may be told that it is not there. */
enum { INDEX_BYTES = 1 << 18, PLACES = 64, ROUNDS = 200000 };

struct scene {
    struct p2pkv_index *index;
    struct p2pkv_key key, kept;
    _Atomic uint64_t value[PLACES]; /* at offset 64 * (1 + place): the version there, 0 while free */
    _Atomic int ends;
    _Atomic uint64_t reads;
};

static void *look(void *argument) {
    struct scene *scene = argument;
    while (!atomic_load(&scene->ends)) {
        struct p2pkv_entry entry;
        CHECK(!p2pkv_index_absent(scene->index, &scene->kept, &entry));
        if (p2pkv_index_find(scene->index, &scene->key, &entry) <= 0)
            continue;
        CHECK(p2pkv_entry_fresh(&entry, p2pkv_index_now(scene->index)));
        CHECK(entry.size == 7 * entry.version);
        if (!p2pkv_index_hold(scene->index, &entry))
            continue;
        uint64_t place = entry.offset / 64 - 1;
        CHECK(atomic_load_explicit(&scene->value[place], memory_order_relaxed) == entry.version);
        p2pkv_index_use(scene->index, &entry);
        p2pkv_index_let_go(scene->index, entry.offset);
        atomic_fetch_add(&scene->reads, 1);
    }
    return NULL;
}

static void open_gate(struct p2pkv_index *index, uint32_t bucket) {
    uint64_t until = UINT64_MAX;
    p2pkv_index_open_gates((uintptr_t)index, (uintptr_t)&until, bucket, 1);
}

static uint32_t bucket_of_kept(const struct scene *scene) {
    return p2pkv_bucket_of(scene->kept.word, scene->kept.bytes, 2);
}

static void keep(struct scene *scene, int round) {
    uint32_t bucket = bucket_of_kept(scene);
    struct p2pkv_entry entry = {.offset = 64, .version = 2 + (uint64_t)round, .bucket = bucket};
    int64_t slot = p2pkv_index_publish(scene->index, &scene->kept, &entry);
    CHECK(slot >= 0);
    if (round == 0)
        open_gate(scene->index, bucket);
    if (round % 8)
        return;
    p2pkv_index_close_gate((uintptr_t)scene->index, bucket);
    CHECK(p2pkv_index_withdraw(scene->index, (uint64_t)slot, entry.version));
    CHECK(p2pkv_index_publish(scene->index, &scene->kept, &entry) >= 0);
    open_gate(scene->index, bucket);
}

static void move_about(struct scene *scene) {
    uint64_t place = 0, version = 0;
    uint32_t bucket = 1 - bucket_of_kept(scene);
    int64_t slot = -1;
    for (int round = 0; round < ROUNDS; round++) {
        keep(scene, round);
        uint64_t next = (place + 1) % PLACES;
        while (atomic_load(&scene->value[next])) { /* left earlier, and held then */
            if (!p2pkv_index_held(scene->index, 64 * (1 + next)))
                atomic_store(&scene->value[next], 0);
        }
        struct p2pkv_entry entry = {.offset = 64 * (1 + next), .version = ++version,
                                    .bucket = bucket};
        entry.size = 7 * version;
        atomic_store(&scene->value[next], version);
        if (round % 16 == 15)
            CHECK(p2pkv_index_withdraw(scene->index, (uint64_t)slot, version - 1));
        slot = p2pkv_index_publish(scene->index, &scene->key, &entry);
        CHECK(slot >= 0);
        if (version > 1 && !p2pkv_index_held(scene->index, 64 * (1 + place)))
            atomic_store(&scene->value[place], 0);
        place = next;
    }
}

static void index_under_way(void) {
    struct scene scene = {0};
    void *memory = aligned_alloc(64, INDEX_BYTES);
    memset(memory, 0, INDEX_BYTES);
    uintptr_t keeper = p2pkv_index_create((uintptr_t)memory, INDEX_BYTES, 2);
    CHECK(keeper != 0);
    CHECK(p2pkv_index_check((uintptr_t)memory, INDEX_BYTES));
    scene.index = memory;
    CHECK(p2pkv_key_set(&scene.key, "a key", 5));
    CHECK(p2pkv_key_set(&scene.kept, "another", 7));
    open_gate(memory, 1 - bucket_of_kept(&scene));
    pthread_t readers[2];
    for (int i = 0; i < 2; i++)
        pthread_create(&readers[i], NULL, look, &scene);
    move_about(&scene);
    while (atomic_load(&scene.reads) < 100) /* what is there at the end stays */
        sched_yield();
    atomic_store(&scene.ends, 1);
    for (int i = 0; i < 2; i++)
        pthread_join(readers[i], NULL);
    p2pkv_index_close(keeper);
    CHECK(!p2pkv_index_alive((uintptr_t)memory));
    CHECK(p2pkv_index_now(scene.index) == 0);
    free(memory);
}

int main(void) {
    srand(1);
    index_under_way();
    copies();
    refused_copies();
    checksums();
    transfers();
    deadlines();
    ends();
    exchange(0, 64, 0);
    exchange(33, 33, 0);
    exchange(33, 64, 0);
    exchange(33, 32, EMSGSIZE);
    return failures ? EXIT_FAILURE : EXIT_SUCCESS;
}
