/*
 * Read connections: threads of the node's process that answer from the published index, without the
 * GIL. A connection has one request at a time in work and one reply on its way; what it sends
 * meanwhile waits in the kernel. One that does not go on for `stall_ns` in the middle of something is
 * closed, so a peer that does not read holds values for no longer than that. An idle one has no
 * memory but its record.
 */
#include "read_server.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum {
    EVENTS = 64,
    ACCEPTS = 32,       /* of one wake-up */
    STEPS = 16,         /* requests of one connection before others get their turn */
    TURN = 1 << 20,     /* bytes, likewise; give or take a socket's buffer */
    INPUT = 64 << 10,   /* of a receive */
    INPUT_MIN = 4 << 10, /* of what is kept of one */
    MAX_IOV = 1024,
    LOCAL_BUFFER = 400000, /* measured: from 200 to 500 KB there is little difference */
    SWEEP_MS = 200,     /* how often connections that stand still are looked for */
    DEAF_NS = 100000000, /* without descriptors or memory for connections nobody is accepted */
    SPIN_RETRY = 64
};

enum outcome { DONE, BLOCKED, YIELD, CLOSED, BROKEN };

struct input {
    uint8_t *bytes;
    size_t start, end, room;
};

struct connection {
    struct connection *next, *previous, *again;
    int fd;
    uint8_t admitted, waits_out, is_again;
    int64_t since_ns; /* since when something is under way; 0: nothing is */
    struct input input;
    struct reply *reply;
};

struct worker {
    struct read_server *server;
    pthread_t thread;
    int started, epoll, wake;
    int64_t deaf_until_ns, swept_ns;
    uint32_t busy, waits;
    int spin_pays;
    struct connection all; /* of the ring of all; itself none */
    struct connection *again;
    struct input scratch;
    struct reply room;
    uint8_t *head;
};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* -- connections */

static void set_busy(struct worker *worker, struct connection *connection, int busy) {
    if (busy == (connection->since_ns != 0))
        return;
    connection->since_ns = busy ? now_ns() : 0;
    worker->busy += busy ? 1 : (uint32_t)-1;
}

static void end(struct worker *worker, struct connection *connection) {
    if (connection->is_again) {
        struct connection **at = &worker->again;
        while (*at != connection)
            at = &(*at)->again;
        *at = connection->again;
    }
    set_busy(worker, connection, 0);
    if (connection->reply != NULL)
        read_reply_end(worker->server, connection->reply);
    free(connection->reply);
    free(connection->input.bytes);
    connection->next->previous = connection->previous;
    connection->previous->next = connection->next;
    close(connection->fd);
    free(connection);
    __atomic_fetch_sub(&worker->server->figures.connections, 1, __ATOMIC_RELAXED);
}

static void drop(struct worker *worker, struct connection *connection) {
    count(&worker->server->figures.dropped, 1);
    end(worker, connection);
}

/* Whether both ends are on this host. */
static int is_local(int fd) {
    struct sockaddr_storage ours, theirs;
    socklen_t our_size = sizeof ours, their_size = sizeof theirs;
    memset(&ours, 0, sizeof ours);
    memset(&theirs, 0, sizeof theirs);
    if (getsockname(fd, (void *)&ours, &our_size) || getpeername(fd, (void *)&theirs, &their_size))
        return 0;
    if (ours.ss_family == AF_INET)
        return ((struct sockaddr_in *)&ours)->sin_addr.s_addr ==
               ((struct sockaddr_in *)&theirs)->sin_addr.s_addr;
    return memcmp(&((struct sockaddr_in6 *)&ours)->sin6_addr,
                  &((struct sockaddr_in6 *)&theirs)->sin6_addr, sizeof(struct in6_addr)) == 0;
}

static int configure(int fd) {
    const struct {
        int level, name, value;
    } options[] = {
        {IPPROTO_TCP, TCP_NODELAY, 1},    {SOL_SOCKET, SO_KEEPALIVE, 1},
        {IPPROTO_TCP, TCP_KEEPIDLE, 5},   {IPPROTO_TCP, TCP_KEEPINTVL, 2},
        {IPPROTO_TCP, TCP_KEEPCNT, 3},    {IPPROTO_TCP, TCP_USER_TIMEOUT, 10000},
    };
    for (size_t i = 0; i < sizeof options / sizeof options[0]; i++)
        if (setsockopt(fd, options[i].level, options[i].name, &options[i].value, sizeof(int)) < 0)
            return -1;
    /* What is on its way within a host stays in the caches then, which is worth half of the rate.
     * Elsewhere the kernel finds the size that the way needs. */
    int size = LOCAL_BUFFER;
    return is_local(fd) ? setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size) : 0;
}

static int watch(struct worker *worker, int operation, struct connection *connection) {
    struct epoll_event event = {.events = connection->waits_out ? EPOLLOUT : EPOLLIN,
                                .data.ptr = connection};
    return epoll_ctl(worker->epoll, operation, connection->fd, &event);
}

static void take(struct worker *worker, int fd) {
    struct connection *connection = calloc(1, sizeof *connection);
    if (connection == NULL || configure(fd) < 0) {
        free(connection);
        close(fd);
        return;
    }
    connection->fd = fd;
    if (watch(worker, EPOLL_CTL_ADD, connection) < 0) {
        free(connection);
        close(fd);
        return;
    }
    connection->next = &worker->all;
    connection->previous = worker->all.previous;
    connection->previous->next = connection->next->previous = connection;
    count(&worker->server->figures.connections, 1);
    set_busy(worker, connection, 1); /* a token is due */
}

static int listen_to(struct worker *worker, int operation) {
    struct epoll_event event = {.events = EPOLLIN | EPOLLEXCLUSIVE, .data.ptr = worker};
    return epoll_ctl(worker->epoll, operation, worker->server->listener, &event);
}

static void accept_some(struct worker *worker) {
    struct read_server *server = worker->server;
    for (int i = 0; i < ACCEPTS; i++) {
        int fd = accept4(server->listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
                listen_to(worker, EPOLL_CTL_DEL);
                worker->deaf_until_ns = now_ns() + DEAF_NS;
            }
            return;
        }
        if (__atomic_load_n(&server->figures.connections, __ATOMIC_RELAXED) <
            server->connections_max) {
            take(worker, fd);
            continue;
        }
        count(&server->figures.dropped, 1);
        close(fd);
    }
}

/* -- what arrives */

/* Room for more, by what is there and not by what was announced. 0: there is none. */
static int make_room(struct worker *worker, struct connection *connection, struct input **input) {
    struct input *in = *input;
    if (in->end < in->room)
        return 1;
    if (in->start > 0) {
        memmove(in->bytes, in->bytes + in->start, in->end - in->start);
        in->end -= in->start, in->start = 0;
        return 1;
    }
    uint8_t *grown = realloc(in == &worker->scratch ? NULL : in->bytes, 2 * in->room);
    if (grown == NULL)
        return 0;
    if (in == &worker->scratch)
        memcpy(grown, in->bytes, in->end);
    connection->input = (struct input){grown, 0, in->end, 2 * in->room};
    worker->scratch.start = worker->scratch.end = 0;
    *input = &connection->input;
    return 1;
}

/* Keeps what was received and not used yet; gives memory back that is not needed. 0: no memory. */
static int stash(struct worker *worker, struct connection *connection, struct input *input) {
    size_t left = input->end - input->start;
    if (input == &connection->input) {
        if (left == 0) {
            free(input->bytes);
            *input = (struct input){NULL, 0, 0, 0};
        }
        return 1;
    }
    if (left > 0) {
        size_t room = left < INPUT_MIN / 2 ? INPUT_MIN : 2 * left;
        uint8_t *bytes = malloc(room);
        if (bytes == NULL)
            return 0;
        memcpy(bytes, input->bytes + input->start, left);
        connection->input = (struct input){bytes, 0, left, room};
    }
    worker->scratch.start = worker->scratch.end = 0;
    return 1;
}

/* One receive. DONE: something came, and maybe that was all. */
static enum outcome receive(struct connection *connection, struct input *input, int *all) {
    size_t room = input->room - input->end;
    if (input->start == input->end)
        input->start = input->end = 0, room = input->room;
    ssize_t n = recv(connection->fd, input->bytes + input->end, room, 0);
    if (n == 0)
        return input->end > 0 ? BROKEN : CLOSED;
    if (n < 0)
        return errno == EAGAIN || errno == EINTR ? BLOCKED : BROKEN;
    input->end += (size_t)n;
    *all = (size_t)n < room;
    return DONE;
}

/* -- what leaves */

static enum outcome push(struct connection *connection, struct reply *reply, size_t *turn) {
    while (reply->left > 0) {
        if (*turn >= TURN)
            return YIELD;
        struct msghdr message = {.msg_iov = reply->iov,
                                 .msg_iovlen = reply->pieces < MAX_IOV ? reply->pieces : MAX_IOV};
        ssize_t n = sendmsg(connection->fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n < 0)
            return errno == EAGAIN || errno == EINTR ? BLOCKED : BROKEN;
        *turn += (size_t)n;
        read_reply_advance(reply, (uint64_t)n);
    }
    return DONE;
}

/* Answers a request; what does not leave at once is kept with the connection. */
static enum outcome answer(struct worker *worker, struct connection *connection,
                           const struct read_request *request, size_t *turn) {
    struct reply reply = worker->room;
    read_answer(worker->server, request, &reply, worker->head);
    enum outcome outcome = push(connection, &reply, turn);
    if (outcome == BLOCKED || outcome == YIELD) {
        connection->reply = read_reply_keep(&reply);
        if (connection->reply != NULL)
            return outcome;
        outcome = BROKEN;
    }
    read_reply_end(worker->server, &reply);
    return outcome;
}

static enum outcome finish_reply(struct worker *worker, struct connection *connection,
                                 size_t *turn) {
    enum outcome outcome = push(connection, connection->reply, turn);
    if (outcome != DONE)
        return outcome;
    read_reply_end(worker->server, connection->reply);
    free(connection->reply);
    connection->reply = NULL;
    set_busy(worker, connection, 0);
    return DONE;
}

/* -- a connection's turn */

/* Takes the next request, or the preface. BLOCKED: not all of it is there. */
static enum outcome step(struct worker *worker, struct connection *connection,
                         struct input *input, size_t *turn) {
    const uint8_t *bytes = input->bytes + input->start;
    size_t have = input->end - input->start;
    if (!connection->admitted) {
        if (have < READ_PREFACE)
            return BLOCKED;
        if (!read_admits(bytes, worker->server->token))
            return BROKEN;
        connection->admitted = 1;
        input->start += READ_PREFACE;
        return DONE;
    }
    struct read_request request;
    int64_t taken = read_parse(bytes, have, &request);
    if (taken <= 0)
        return taken < 0 ? BROKEN : BLOCKED;
    input->start += (size_t)taken;
    *turn += (size_t)taken;
    set_busy(worker, connection, 0);
    return answer(worker, connection, &request, turn);
}

static enum outcome take_requests(struct worker *worker, struct connection *connection,
                                  struct input **input, size_t *turn) {
    int all = 0;
    for (int i = 0; i < STEPS; i++) {
        enum outcome outcome = step(worker, connection, *input, turn);
        if (outcome == BROKEN || connection->reply != NULL)
            return outcome;
        if (outcome == DONE)
            continue;
        if (all) /* epoll tells of more */
            return BLOCKED;
        if (!make_room(worker, connection, input))
            return BROKEN;
        outcome = receive(connection, *input, &all);
        if (outcome != DONE)
            return outcome;
    }
    return YIELD;
}

static void come_again(struct worker *worker, struct connection *connection) {
    if (!connection->is_again) {
        connection->is_again = 1;
        connection->again = worker->again;
        worker->again = connection;
    }
}

/* What the connection waits for from now on. */
static int settle(struct worker *worker, struct connection *connection, enum outcome outcome) {
    int out = connection->reply != NULL;
    if (outcome == YIELD) {
        come_again(worker, connection);
        return 0;
    }
    if (out != connection->waits_out) {
        connection->waits_out = (uint8_t)out;
        return watch(worker, EPOLL_CTL_MOD, connection);
    }
    return 0;
}

static void serve(struct worker *worker, struct connection *connection) {
    struct input *input = connection->input.bytes ? &connection->input : &worker->scratch;
    enum outcome outcome = DONE;
    size_t turn = 0;
    if (connection->reply != NULL)
        outcome = finish_reply(worker, connection, &turn);
    if (outcome == DONE)
        outcome = take_requests(worker, connection, &input, &turn);
    int kept = stash(worker, connection, input);
    if (outcome == CLOSED && connection->admitted) {
        end(worker, connection);
        return;
    }
    if (outcome >= CLOSED || !kept) {
        drop(worker, connection);
        return;
    }
    if (outcome != YIELD || connection->reply != NULL)
        set_busy(worker, connection,
                 !connection->admitted || connection->reply || connection->input.bytes);
    if (settle(worker, connection, outcome) < 0)
        drop(worker, connection);
}

/* -- the thread */

static void sweep(struct worker *worker, int64_t now) {
    worker->swept_ns = now;
    if (worker->deaf_until_ns && now >= worker->deaf_until_ns) {
        worker->deaf_until_ns = 0;
        listen_to(worker, EPOLL_CTL_ADD);
    }
    if (worker->busy == 0)
        return;
    struct connection *connection = worker->all.next;
    while (connection != &worker->all) {
        struct connection *next = connection->next;
        if (connection->since_ns && now - connection->since_ns > worker->server->stall_ns)
            drop(worker, connection);
        connection = next;
    }
}

/* Polls for a moment before it sleeps, as long as that pays: an idle core takes long to wake up. */
static int spin(struct worker *worker, struct epoll_event *events) {
    int64_t spin_ns = worker->server->spin_ns;
    if (spin_ns == 0 || (!worker->spin_pays && ++worker->waits % SPIN_RETRY))
        return 0;
    int64_t until = now_ns() + spin_ns;
    int n = 0;
    while (n == 0 && now_ns() < until)
        n = epoll_wait(worker->epoll, events, EVENTS, 0);
    worker->spin_pays = n > 0;
    return n;
}

static int wait_for_events(struct worker *worker, struct epoll_event *events) {
    if (worker->again != NULL)
        return epoll_wait(worker->epoll, events, EVENTS, 0);
    int n = spin(worker, events);
    if (n != 0)
        return n;
    int timeout = worker->busy || worker->deaf_until_ns ? SWEEP_MS : -1;
    return epoll_wait(worker->epoll, events, EVENTS, timeout);
}

static void run_again(struct worker *worker) {
    struct connection *connection = worker->again;
    worker->again = NULL;
    while (connection != NULL) {
        struct connection *next = connection->again;
        connection->is_again = 0;
        serve(worker, connection);
        connection = next;
    }
}

static void *work(void *argument) {
    struct worker *worker = argument;
    struct epoll_event events[EVENTS];
    while (!__atomic_load_n(&worker->server->stopping, __ATOMIC_ACQUIRE)) {
        int n = wait_for_events(worker, events);
        for (int i = 0; i < n; i++) {
            if (events[i].data.ptr == worker)
                accept_some(worker);
            else if (events[i].data.ptr != NULL)
                serve(worker, events[i].data.ptr);
        }
        run_again(worker);
        int64_t now = now_ns();
        if (now - worker->swept_ns > SWEEP_MS * (int64_t)1000000)
            sweep(worker, now);
    }
    while (worker->all.next != &worker->all)
        end(worker, worker->all.next);
    return NULL;
}

/* -- life */

static int start_worker(struct worker *worker) {
    worker->all.next = worker->all.previous = &worker->all;
    worker->spin_pays = 1;
    worker->scratch = (struct input){malloc(INPUT), 0, 0, INPUT};
    worker->epoll = epoll_create1(EPOLL_CLOEXEC);
    worker->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = NULL};
    if (!read_reply_make(&worker->room, &worker->head) || worker->scratch.bytes == NULL)
        return ENOMEM;
    if (worker->epoll < 0 || worker->wake < 0 || listen_to(worker, EPOLL_CTL_ADD) < 0 ||
        epoll_ctl(worker->epoll, EPOLL_CTL_ADD, worker->wake, &event) < 0)
        return errno;
    int error = p2pkv_thread(&worker->thread, NULL, work, worker);
    worker->started = error == 0;
    return error;
}

static void stop_worker(struct worker *worker) {
    uint64_t one = 1;
    if (worker->started) {
        while (write(worker->wake, &one, sizeof one) < 0 && errno == EINTR)
            ;
        pthread_join(worker->thread, NULL);
    }
    read_reply_free(&worker->room, worker->head);
    free(worker->scratch.bytes);
    if (worker->epoll >= 0)
        close(worker->epoll);
    if (worker->wake >= 0)
        close(worker->wake);
}

void p2pkv_read_server_stop(uintptr_t address) {
    struct read_server *server = (void *)address;
    __atomic_store_n(&server->stopping, 1, __ATOMIC_RELEASE);
    for (uint32_t i = 0; i < server->threads; i++)
        stop_worker(&server->workers[i]);
    free(server->workers);
    free(server);
}

uintptr_t p2pkv_read_server_start(const p2pkv_read_options *options, int *error) {
    struct read_server *server = calloc(1, sizeof *server);
    struct worker *workers = calloc(options->threads, sizeof *workers);
    if (server == NULL || workers == NULL) {
        free(server);
        free(workers);
        *error = ENOMEM;
        return 0;
    }
    *server = (struct read_server){
        .index = (const void *)options->index,
        .arena = (const void *)options->arena,
        .arena_bytes = options->arena_bytes,
        .payload_max = options->payload_max,
        .stall_ns = options->stall_ns,
        .spin_ns = options->spin_ns,
        .connections_max = options->connections_max,
        .listener = options->listener,
        .workers = workers,
    };
    memcpy(server->token, options->token, READ_TOKEN);
    for (*error = 0; server->threads < options->threads && *error == 0; server->threads++) {
        struct worker *worker = &workers[server->threads];
        worker->server = server;
        worker->epoll = worker->wake = -1;
        *error = start_worker(worker);
    }
    if (*error == 0)
        return (uintptr_t)server;
    p2pkv_read_server_stop((uintptr_t)server);
    return 0;
}

void p2pkv_read_server_figures(uintptr_t address, uint64_t *figures) {
    const struct figures *now = &((const struct read_server *)address)->figures;
    const uint64_t *all[] = {&now->connections, &now->dropped, &now->requests,
                             &now->values,      &now->misses,  &now->flags,
                             &now->absent,      &now->asks,    &now->bytes};
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        figures[i] = __atomic_load_n(all[i], __ATOMIC_RELAXED);
}
