/* Gather and scatter over a stream socket. */
#include "native.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>

enum {
    MAX_IOV = 1024,       /* the kernel's UIO_MAXIOV */
    MAX_BYTES = 64 << 20, /* of one piece in one system call: so often is the deadline looked at */
    SECOND_NS = 1000000000
};

struct wait {
    int64_t deadline_ns, spin_ns;
    int blocking; /* the socket's mode */
};

struct window;

struct direction {
    int64_t (*once)(int fd, struct window *window, int flags); /* bytes, or the negative of an error */
    short events;
    int timeout_option;
};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * SECOND_NS + t.tv_nsec;
}

/* What one system call is to move. */
struct window {
    struct msghdr message;
    uint64_t bytes;
    struct iovec iov[MAX_IOV];
};

/* The pieces from `at` on. Those of no length are left out: a receive of nothing returns 0, as at
 * the end of the stream. */
static void open_window(struct window *window, const struct p2pkv_pieces *pieces,
                        struct p2pkv_cursor at) {
    size_t n = 0, skip = at.offset;
    window->bytes = 0;
    for (size_t i = at.index; i < pieces->count && n < MAX_IOV && window->bytes < MAX_BYTES; i++) {
        struct iovec piece = pieces->iov[i];
        piece.iov_base = (char *)piece.iov_base + skip;
        piece.iov_len -= skip;
        skip = 0;
        if (piece.iov_len > MAX_BYTES)
            piece.iov_len = MAX_BYTES;
        window->bytes += piece.iov_len;
        if (piece.iov_len > 0)
            window->iov[n++] = piece;
    }
    window->message = (struct msghdr){.msg_iov = window->iov, .msg_iovlen = n};
}

/* EWOULDBLOCK may differ from EAGAIN by the standard; not on Linux. */
static int64_t send_once(int fd, struct window *window, int flags) {
    ssize_t n = sendmsg(fd, &window->message, flags | MSG_NOSIGNAL);
    return n >= 0 ? n : -errno;
}

static int64_t recv_once(int fd, struct window *window, int flags) {
    ssize_t n = recvmsg(fd, &window->message, flags | MSG_WAITALL);
    if (n == 0)
        return -P2PKV_CLOSED;
    return n > 0 ? n : -errno;
}

static const struct direction SENDING = {send_once, POLLOUT, SO_SNDTIMEO};
static const struct direction RECEIVING = {recv_once, POLLIN, SO_RCVTIMEO};

/* Polls until ready or until the spin is over; as poll(). It leaves the socket's lock alone, which
 * tries to receive would take from the arriving data. */
static int spin(int fd, short events, int64_t until_ns) {
    struct pollfd ready = {.fd = fd, .events = events};
    int n;
    do {
        n = poll(&ready, 1, 0);
    } while (n == 0 && now_ns() < until_ns);
    return n;
}

/* 0 when the socket may be ready, ETIMEDOUT, or the errno of poll. */
static int wait_ready(int fd, short events, struct wait wait) {
    int64_t now = now_ns(), rest = wait.deadline_ns - now;
    if (rest <= 0)
        return ETIMEDOUT;
    if (wait.spin_ns > 0) {
        if (spin(fd, events, now + (wait.spin_ns < rest ? wait.spin_ns : rest)) > 0)
            return 0;
        rest = wait.deadline_ns - now_ns();
        if (rest <= 0)
            return ETIMEDOUT;
    }
    struct pollfd ready = {.fd = fd, .events = events};
    struct timespec timeout = {.tv_sec = rest / SECOND_NS, .tv_nsec = rest % SECOND_NS};
    int n = ppoll(&ready, 1, &timeout, NULL);
    if (n < 0)
        return errno;
    return n > 0 ? 0 : ETIMEDOUT;
}

/* Lets a system call on a blocking socket wait until the deadline; the flags for it. One such call
 * costs a third less than a try, a poll and a second try. Zero would mean no limit to the kernel. */
static int let_wait(int fd, const struct direction *direction, struct wait wait) {
    int64_t now = now_ns(), rest = wait.deadline_ns - now;
    if (!wait.blocking || rest < 1000)
        return MSG_DONTWAIT;
    struct timeval limit = {.tv_sec = rest / SECOND_NS, .tv_usec = rest % SECOND_NS / 1000};
    if (setsockopt(fd, SOL_SOCKET, direction->timeout_option, &limit, sizeof limit) < 0)
        return MSG_DONTWAIT;
    if (wait.spin_ns > 0)
        spin(fd, direction->events, now + (wait.spin_ns < rest ? wait.spin_ns : rest));
    return 0;
}

static int is_blocking(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && !(flags & O_NONBLOCK);
}

/* A call that may wait comes back early for a signal, whose handler is due, or for an end that the
 * next call will tell: EINTR. One that may not wait has taken what there was: sleep until there is
 * more. */
static p2pkv_transfer move_all(const struct direction *direction, int fd,
                               const struct p2pkv_pieces *pieces, uint64_t start,
                               struct wait wait) {
    p2pkv_transfer transfer = {start, 0};
    struct p2pkv_cursor at = {0, 0};
    struct window window;
    p2pkv_advance(pieces, &at, start);
    while (transfer.bytes < pieces->bytes && !transfer.error) {
        int flags = let_wait(fd, direction, wait);
        open_window(&window, pieces, at);
        int64_t n = direction->once(fd, &window, flags);
        if (n > 0) {
            transfer.bytes += (uint64_t)n;
            p2pkv_advance(pieces, &at, (uint64_t)n);
        }
        if (n < 0 && n != -EAGAIN)
            transfer.error = (int)-n;
        else if (n > 0 && (uint64_t)n < window.bytes && flags == 0)
            transfer.error = EINTR;
        else if (transfer.bytes < pieces->bytes && n != (int64_t)window.bytes)
            transfer.error = wait_ready(fd, direction->events, wait);
    }
    return transfer;
}

static int64_t move_some(const struct direction *direction, int fd,
                         const struct p2pkv_pieces *pieces, uint64_t start) {
    struct p2pkv_cursor at = {0, 0};
    struct window window;
    if (start >= pieces->bytes)
        return 0;
    p2pkv_advance(pieces, &at, start);
    open_window(&window, pieces, at);
    return direction->once(fd, &window, MSG_DONTWAIT);
}

p2pkv_transfer p2pkv_send_all(int fd, uintptr_t pieces, uint64_t start, int64_t deadline_ns,
                              int64_t spin_ns) {
    struct wait wait = {deadline_ns, spin_ns, is_blocking(fd)};
    return move_all(&SENDING, fd, (const void *)pieces, start, wait);
}

p2pkv_transfer p2pkv_recv_all(int fd, uintptr_t pieces, uint64_t start, int64_t deadline_ns,
                              int64_t spin_ns) {
    struct wait wait = {deadline_ns, spin_ns, is_blocking(fd)};
    return move_all(&RECEIVING, fd, (const void *)pieces, start, wait);
}

int64_t p2pkv_send_some(int fd, uintptr_t pieces, uint64_t start) {
    return move_some(&SENDING, fd, (const void *)pieces, start);
}

int64_t p2pkv_recv_some(int fd, uintptr_t pieces, uint64_t start) {
    return move_some(&RECEIVING, fd, (const void *)pieces, start);
}

static uint64_t little_endian(const uint8_t *bytes, int n) {
    uint64_t value = 0;
    while (n-- > 0)
        value = value << 8 | bytes[n];
    return value;
}

/* Receives prefix and head up to the end of `control`. */
static int recv_control(int fd, const struct p2pkv_pieces *control, p2pkv_exchange *state,
                        struct wait wait) {
    p2pkv_transfer got = move_all(&RECEIVING, fd, control, state->received, wait);
    state->received = got.bytes;
    return got.error;
}

static int recv_head(int fd, const struct iovec *head, p2pkv_exchange *state, struct wait wait) {
    struct iovec iov[2] = {{state->prefix, P2PKV_PREFIX}, {head->iov_base, 0}};
    struct p2pkv_pieces control = {.count = 2, .bytes = P2PKV_PREFIX, .iov = iov};
    int error = recv_control(fd, &control, state, wait);
    if (error)
        return error;
    state->head_length = (uint32_t)little_endian(state->prefix, 4);
    state->payload_length = little_endian(state->prefix + 4, 8);
    if (state->head_length > head->iov_len)
        return EMSGSIZE;
    iov[1].iov_len = state->head_length;
    control.bytes += state->head_length;
    wait.blocking = 0; /* it came with the prefix: a try is cheaper than to set a limit first */
    return recv_control(fd, &control, state, wait);
}

int p2pkv_call(int fd, uintptr_t request, uintptr_t head, p2pkv_exchange *state,
               int64_t deadline_ns, int64_t spin_ns) {
    const struct p2pkv_pieces *into = (const void *)head;
    struct wait wait = {deadline_ns, 0, 0};
    if (into->count != 1)
        return EINVAL;
    if (request) {
        p2pkv_transfer sent = move_all(&SENDING, fd, (const void *)request, state->sent, wait);
        state->sent = sent.bytes;
        if (sent.error)
            return sent.error;
    }
    wait.spin_ns = spin_ns;
    wait.blocking = is_blocking(fd);
    return recv_head(fd, into->iov, state, wait);
}
