/*
 * What Python calls. Read by the compiler through native.h and by the cffi builder as it is, so
 * there are no preprocessor lines here.
 *
 * Every function runs without the GIL, keeps no state between calls and reports errors as values:
 * an errno, or one of the codes below, which are above every errno. `pieces` is the address of a
 * `struct p2pkv_pieces`; times are nanoseconds, deadlines those of CLOCK_MONOTONIC.
 */

enum {
    P2PKV_ABI = 4,       /* raised with every change of this file or of the pieces' layout */
    P2PKV_CLOSED = 4096, /* the peer closed its side in good order before the end */
    P2PKV_PREFIX = 12    /* bytes before a head: u32 head length, u64 payload length */
};

/* How far a transfer came: `bytes` counts from the start of the pieces; error 0 is the end. */
typedef struct {
    uint64_t bytes;
    int error;
} p2pkv_transfer;

/* A request and the head of its answer under way; zeroed by the caller before each one. */
typedef struct {
    uint64_t sent;
    uint64_t received; /* of prefix and head together */
    uint64_t payload_length;
    uint32_t head_length;
    uint8_t prefix[12];
} p2pkv_exchange;

/* Copies the sources, taken as one run of bytes, over the targets; EINVAL unless the totals agree,
 * EFAULT for a null address. From `streaming_min` bytes on the stores go around the caches. At most
 * `threads` threads, fewer for small totals. Nothing is written when an error is returned. */
int p2pkv_copy(uintptr_t targets, uintptr_t sources, int threads, uint64_t streaming_min);

/* XXH3 (64 bits) of each of `n` values of these sizes, which the pieces hold one after the other,
 * however they are cut. EINVAL unless the sizes' total is that of the pieces, EFAULT as above.
 * `portable`: without the processor's vector instructions. */
int p2pkv_checksums(uintptr_t values, const uint64_t *sizes, size_t n, uint64_t *sums,
                    int portable);

/* Copies and sums in one pass, a piece at a time while it is in the cache; sizes are of the
 * sources' values. By one thread. */
int p2pkv_copy_checksums(uintptr_t targets, uintptr_t sources, const uint64_t *sizes, size_t n,
                         uint64_t *sums, uint64_t streaming_min);

/* The whole of the pieces from byte `start` on, over a socket in either mode. EINTR is returned
 * with what was done, so that the caller can see to its signals and go on from there. On a blocking
 * socket this sets SO_SNDTIMEO or SO_RCVTIMEO and leaves it so. */
p2pkv_transfer p2pkv_send_all(int fd, uintptr_t pieces, uint64_t start, int64_t deadline_ns,
                              int64_t spin_ns);
p2pkv_transfer p2pkv_recv_all(int fd, uintptr_t pieces, uint64_t start, int64_t deadline_ns,
                              int64_t spin_ns);

/* One system call that does not wait: bytes moved, or the negative of an error. */
int64_t p2pkv_send_some(int fd, uintptr_t pieces, uint64_t start);
int64_t p2pkv_recv_some(int fd, uintptr_t pieces, uint64_t start);

/* Sends the request (0: none), then receives prefix and head of the answer into the one piece of
 * `head`. EMSGSIZE, with head_length set, for a head that does not fit. After EINTR it is called
 * again with the same state. */
int p2pkv_call(int fd, uintptr_t request, uintptr_t head, p2pkv_exchange *state,
               int64_t deadline_ns, int64_t spin_ns);

/* -- the published index (index.h); `memory` is its address */

/* Bytes that an index of so many slots takes. */
uint64_t p2pkv_index_bytes(uint64_t slots, uint32_t buckets);

/* Makes an index in memory that is all zero; what `close` wants, or 0 with errno. The memory must
 * stay mapped until it is closed. */
uintptr_t p2pkv_index_create(uintptr_t memory, uint64_t bytes, uint32_t buckets);
void p2pkv_index_close(uintptr_t keeper);

/* Whether an index of this layout is there. */
int p2pkv_index_check(uintptr_t memory, uint64_t bytes);

/* Whether the node that made it lives and has not closed it. */
int p2pkv_index_alive(uintptr_t memory);

/* Until when each bucket from `first` on is served by nobody else; `untils` are uint64_t. */
void p2pkv_index_open_gates(uintptr_t memory, uintptr_t untils, uint32_t first, uint32_t count);
void p2pkv_index_close_gate(uintptr_t memory, uint32_t bucket);

/* Addresses of the functions of python_pieces.c and python_index.c: they want the GIL, which cffi gives away. */
uintptr_t p2pkv_python_function(int which);
