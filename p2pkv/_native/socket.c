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

/* The pieces from `at` on. A cursor rests on no piece without length, so there is something to
 * receive, and a result of 0 is the end of the stream. */
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

int p2pkv_wait_readable(int fd, int64_t deadline_ns, int64_t spin_ns, int *slept) {
    struct wait wait = {deadline_ns, 0};
    int64_t now = now_ns(), rest = deadline_ns - now;
    *slept = spin_ns <= 0 || rest <= 0 ||
             spin(fd, POLLIN, now + (spin_ns < rest ? spin_ns : rest)) <= 0;
    return *slept ? wait_ready(fd, POLLIN, wait) : 0;
}

/* Lets the next system call on a blocking socket wait until the deadline; 0, or an errno. One such
 * call is less than a try, a poll and a second try. */
static int let_wait(int fd, const struct direction *direction, struct wait wait) {
    int64_t now = now_ns(), rest = wait.deadline_ns - now;
    struct timeval limit = {.tv_sec = rest / SECOND_NS, .tv_usec = rest % SECOND_NS / 1000};
    if (rest < 1000) /* a limit of 0 is none */
        return ETIMEDOUT;
    if (setsockopt(fd, SOL_SOCKET, direction->timeout_option, &limit, sizeof limit) < 0)
        return errno;
    if (wait.spin_ns > 0)
        spin(fd, direction->events, now + (wait.spin_ns < rest ? wait.spin_ns : rest));
    return 0;
}

static int is_blocking(int fd) {
    int flags = fcntl(fd, F_GETFL);
    return flags >= 0 && !(flags & O_NONBLOCK);
}

/* A transfer under way. */
struct job {
    const struct direction *direction;
    int fd;
    const struct p2pkv_pieces *pieces;
    struct p2pkv_cursor at;
    uint64_t done;
    struct wait wait;
};

static struct job job_from(const struct direction *direction, int fd,
                           const struct p2pkv_pieces *pieces, uint64_t start, struct wait wait) {
    struct job job = {direction, fd, pieces, {0, 0}, start, wait};
    p2pkv_advance(pieces, &job.at, start);
    return job;
}

/* One system call: 0, EAGAIN if it moved less than it was to, or another error. */
static int move(struct job *job, int flags) {
    struct window window;
    open_window(&window, job->pieces, job->at);
    int64_t n = job->direction->once(job->fd, &window, flags);
    if (n < 0)
        return (int)-n;
    job->done += (uint64_t)n;
    p2pkv_advance(job->pieces, &job->at, (uint64_t)n);
    return (uint64_t)n < window.bytes ? EAGAIN : 0;
}

/* Waits after it has found nothing. */
static int move_polling(struct job *job) {
    int error = move(job, MSG_DONTWAIT);
    if (error == EAGAIN && job->done < job->pieces->bytes)
        error = wait_ready(job->fd, job->direction->events, job->wait);
    return error;
}

/* Waits in the call. It comes back early with something for a signal, whose handler is due, or for
 * an end that the next call will tell; with nothing at the deadline, or a tick of the kernel before. */
static int move_waiting(struct job *job) {
    uint64_t before = job->done;
    int error = let_wait(job->fd, job->direction, job->wait);
    if (error)
        return error == ETIMEDOUT ? move_polling(job) : error;
    error = move(job, 0);
    if (error == EAGAIN)
        error = job->done > before ? EINTR : wait_ready(job->fd, job->direction->events, job->wait);
    return error;
}

static p2pkv_transfer run(struct job job, int blocking) {
    int error = 0;
    while (job.done < job.pieces->bytes && !error)
        error = blocking ? move_waiting(&job) : move_polling(&job);
    return (p2pkv_transfer){job.done, error};
}

/* Most often everything fits: the first try waits for nothing, and asks for nothing before. */
p2pkv_transfer p2pkv_send_all(int fd, uintptr_t pieces, uint64_t start, int64_t deadline_ns,
                              int64_t spin_ns) {
    struct wait wait = {deadline_ns, spin_ns};
    struct job job = job_from(&SENDING, fd, (const void *)pieces, start, wait);
    int error = job.done < job.pieces->bytes ? move(&job, MSG_DONTWAIT) : 0;
    if (job.done == job.pieces->bytes || (error && error != EAGAIN))
        return (p2pkv_transfer){job.done, error == EAGAIN ? 0 : error};
    return run(job, is_blocking(fd));
}

p2pkv_transfer p2pkv_recv_all(int fd, uintptr_t pieces, uint64_t start, int64_t deadline_ns,
                              int64_t spin_ns) {
    struct wait wait = {deadline_ns, spin_ns};
    return run(job_from(&RECEIVING, fd, (const void *)pieces, start, wait), is_blocking(fd));
}

static int64_t move_some(const struct direction *direction, int fd,
                         const struct p2pkv_pieces *pieces, uint64_t start) {
    struct wait none = {0, 0};
    struct job job = job_from(direction, fd, pieces, start, none);
    int error = start < pieces->bytes ? move(&job, MSG_DONTWAIT) : 0;
    return job.done > start || !error ? (int64_t)(job.done - start) : -(int64_t)error;
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
                        struct wait wait, int blocking) {
    p2pkv_transfer got = run(job_from(&RECEIVING, fd, control, state->received, wait), blocking);
    state->received = got.bytes;
    return got.error;
}

/* The head came with the prefix: to try for it is less than to set a limit first. */
static int recv_head(int fd, const struct iovec *head, p2pkv_exchange *state, struct wait wait) {
    struct iovec iov[2] = {{state->prefix, P2PKV_PREFIX}, {head->iov_base, 0}};
    struct p2pkv_pieces control = {.count = 2, .bytes = P2PKV_PREFIX, .iov = iov};
    int error = recv_control(fd, &control, state, wait, is_blocking(fd));
    if (error)
        return error;
    state->head_length = (uint32_t)little_endian(state->prefix, 4);
    state->payload_length = little_endian(state->prefix + 4, 8);
    if (state->head_length > head->iov_len)
        return EMSGSIZE;
    iov[1].iov_len = state->head_length;
    control.bytes += state->head_length;
    return recv_control(fd, &control, state, wait, 0);
}

int p2pkv_call(int fd, uintptr_t request, uintptr_t head, p2pkv_exchange *state,
               int64_t deadline_ns, int64_t spin_ns) {
    const struct p2pkv_pieces *into = (const void *)head;
    struct wait wait = {deadline_ns, spin_ns};
    if (into->count != 1)
        return EINVAL;
    if (request) {
        p2pkv_transfer sent = p2pkv_send_all(fd, request, state->sent, deadline_ns, 0);
        state->sent = sent.bytes;
        if (sent.error)
            return sent.error;
    }
    return recv_head(fd, into->iov, state, wait);
}
