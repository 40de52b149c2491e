/* A load generator for benchmarks of gateways: closed loop, one thread, every figure as one JSON object.
 *
 * Usage: load HOST_PORT CONNECTIONS SECONDS MODE BODY_FILE
 *
 *   request   each connection sends its request again as soon as the answer is whole
 *   stream    the same for event streams; an answer is whole with its [DONE]
 *   hold      every connection sends one request and waits; ends after SECONDS
 *   stall     streams whose reader stops for SECONDS after its first bytes
 *
 * Times are in microseconds. "chunk" is the delay from the upstream's stamp in a chunk ("@<19 digits>", CLOCK_MONOTONIC,
 * nanoseconds) to its arrival; "ttft" from the sending of a request to its first chunk; "total" to the end of the answer.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define WARM_UP_NS 500000000LL
#define HEAD_ROOM 16384
#define CARRY 64

enum phase { CONNECTING, HEAD, BODY, CLOSED };
enum mode { REQUEST, STREAM, HOLD, STALL };

struct connection {
    int fd;
    enum phase phase;
    int64_t begun;
    char head[HEAD_ROOM];
    int head_used, status, chunked, first_seen, done_seen;
    long long length, got;
    char tail[8]; /* the last bytes of the body, to see the end of a chunked one */
    int tail_used;
    char carry[CARRY]; /* the last bytes of the read before: a stamp may lie across two */
    int carry_used;
};

struct sample {
    int64_t *values;
    size_t count, room;
};

static int poller, connection_count;
static enum mode mode;
static struct sockaddr_in target;
static char *request;
static size_t request_size;
static int64_t measured_from, measured_to;
static struct sample ttft, chunk, total;
static long long answers, chunks, errors, bytes;
static int last_bad_status;

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void record(struct sample *s, int64_t nanoseconds)
{
    if (s->count == s->room) {
        s->room = s->room ? 2 * s->room : 65536;
        s->values = realloc(s->values, s->room * sizeof *s->values);
    }
    s->values[s->count++] = nanoseconds;
}

static int measuring(int64_t t) { return t >= measured_from && t <= measured_to; }

/* ---- sending ---- */

static void begin_request(struct connection *c)
{
    c->phase = HEAD;
    c->head_used = c->status = c->chunked = c->first_seen = c->done_seen = c->tail_used = c->carry_used = 0;
    c->length = -1;
    c->got = 0;
    c->begun = now();
    if (send(c->fd, request, request_size, MSG_NOSIGNAL) != (ssize_t)request_size) errors++;
}

static void open_connection(struct connection *c)
{
    int one = 1;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    c->phase = CONNECTING;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(c->fd, (struct sockaddr *)&target, sizeof target) && errno != EINPROGRESS) {
        errors++;
        close(c->fd);
        c->phase = CLOSED;
        return;
    }
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &event);
}

static void connected(struct connection *c)
{
    int error = 0;
    socklen_t size = sizeof error;
    getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &size);
    if (error) {
        errors++;
        close(c->fd);
        c->phase = CLOSED;
        return;
    }
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &event);
    begin_request(c);
}

static void reopen(struct connection *c)
{
    close(c->fd);
    c->phase = CLOSED;
    if (mode != HOLD && now() < measured_to) open_connection(c);
}

/* ---- receiving ---- */

static void look_for_stamps(struct connection *c, const char *data, size_t size, int64_t t)
{
    static char joined[CARRY + (1 << 18)];
    memcpy(joined, c->carry, c->carry_used);
    memcpy(joined + c->carry_used, data, size);
    char *at = joined, *end = joined + c->carry_used + size;
    for (;;) {
        char *found = memmem(at, end - at, "\"@", 2);
        if (!found || found + 21 > end) break;
        int64_t sent = strtoll(found + 2, NULL, 10);
        if (!c->first_seen++ && measuring(c->begun)) record(&ttft, t - c->begun);
        if (measuring(sent)) {
            chunks++;
            record(&chunk, t - sent);
        }
        at = found + 21;
    }
    if (memmem(joined, end - joined, "data: [DONE]", 12)) c->done_seen = 1;
    size_t keep = end - at;
    if (keep > CARRY - 1) keep = CARRY - 1;
    memcpy(c->carry, end - keep, keep);
    c->carry_used = keep;
}

static void remember_tail(struct connection *c, const char *data, size_t size)
{
    if (size >= 5) {
        memcpy(c->tail, data + size - 5, 5);
        c->tail_used = 5;
        return;
    }
    char joined[16];
    memcpy(joined, c->tail, c->tail_used);
    memcpy(joined + c->tail_used, data, size);
    int used = c->tail_used + size, skipped = used > 5 ? used - 5 : 0;
    memcpy(c->tail, joined + skipped, used - skipped);
    c->tail_used = used - skipped;
}

static int whole(const struct connection *c)
{
    if (c->length >= 0) return c->got >= c->length;
    return c->chunked && c->tail_used == 5 && memcmp(c->tail, "0\r\n\r\n", 5) == 0;
}

static void answered(struct connection *c, int64_t t)
{
    int good = c->status == 200 && (mode == REQUEST || c->done_seen);
    if (!good) {
        errors++;
        if (c->status != 200) last_bad_status = c->status;
    } else if (measuring(t)) {
        answers++;
        record(&total, t - c->begun);
    }
    if (t >= measured_to) {
        close(c->fd);
        c->phase = CLOSED;
        return;
    }
    begin_request(c);
}

/* Take in a head; returns how many of the bytes belong to it, or -1 while it is not whole. */
static int take_head(struct connection *c, const char *data, size_t size)
{
    size_t room = HEAD_ROOM - 1 - c->head_used, taken = size < room ? size : room;
    int before = c->head_used;
    memcpy(c->head + c->head_used, data, taken);
    c->head_used += taken;
    c->head[c->head_used] = 0;
    char *end = strstr(c->head, "\r\n\r\n");
    if (!end) return -1;
    *end = 0;
    c->status = atoi(c->head + 9);
    char *length = strcasestr(c->head, "\r\ncontent-length:");
    c->length = length ? atoll(length + 17) : -1;
    c->chunked = strcasestr(c->head, "\r\ntransfer-encoding: chunked") != NULL;
    c->phase = BODY;
    return end + 4 - c->head - before;
}

static void readable(struct connection *c)
{
    static char data[1 << 18];
    ssize_t got = recv(c->fd, data, sizeof data, 0);
    if (got < 0 && errno == EAGAIN) return;
    int64_t t = now();
    if (got <= 0) {
        if (c->phase == HEAD || c->phase == BODY) errors++;
        reopen(c);
        return;
    }
    bytes += got;
    char *body = data;
    ssize_t size = got;
    if (c->phase == HEAD) {
        int head = take_head(c, data, got);
        if (head < 0) return;
        body += head;
        size -= head;
        if (mode == REQUEST && !c->first_seen++ && measuring(c->begun)) record(&ttft, t - c->begun);
    }
    c->got += size;
    if (mode != REQUEST && size > 0) look_for_stamps(c, body, size, t);
    if (size > 0) remember_tail(c, body, size);
    if (mode == STALL && c->first_seen) {
        struct epoll_event event = {.events = 0, .data.ptr = c};
        epoll_ctl(poller, EPOLL_CTL_MOD, c->fd, &event);
        return;
    }
    if (whole(c)) answered(c, t);
}

/* ---- reporting ---- */

static int ascending(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

static double quantile(struct sample *s, double q) { return s->count ? s->values[(size_t)(q * (s->count - 1))] / 1000.0 : -1; }

static void print_sample(const char *name, struct sample *s)
{
    qsort(s->values, s->count, sizeof *s->values, ascending);
    printf(", \"%s_p50\": %.1f, \"%s_p99\": %.1f", name, quantile(s, 0.5), name, quantile(s, 0.99));
}

static char *read_file(const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    if (!file) {
        perror(path);
        exit(1);
    }
    fseek(file, 0, SEEK_END);
    *size = ftell(file);
    rewind(file);
    char *text = malloc(*size + 1);
    if (fread(text, 1, *size, file) != *size) exit(1);
    text[*size] = 0;
    fclose(file);
    return text;
}

static enum mode mode_named(const char *name)
{
    const char *names[] = {"request", "stream", "hold", "stall"};
    for (int i = 0; i < 4; i++)
        if (strcmp(name, names[i]) == 0) return i;
    fprintf(stderr, "load: no mode %s\n", name);
    exit(2);
}

int main(int argc, char **argv)
{
    if (argc != 6) {
        fprintf(stderr, "usage: load PORT CONNECTIONS SECONDS request|stream|hold|stall BODY_FILE\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    int port = atoi(argv[1]);
    connection_count = atoi(argv[2]);
    mode = mode_named(argv[4]);
    size_t body_size;
    char *body = read_file(argv[5], &body_size);
    request = malloc(body_size + 512);
    request_size = sprintf(request,
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nContent-Type: application/json\r\n"
        "Authorization: Bearer rk-bench\r\nAccept: */*\r\nContent-Length: %zu\r\n\r\n", port, body_size);
    memcpy(request + request_size, body, body_size);
    request_size += body_size;
    target = (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};

    struct connection *all = calloc(connection_count, sizeof *all);
    poller = epoll_create1(0);
    int64_t begun = now();
    measured_from = begun + WARM_UP_NS;
    measured_to = measured_from + (int64_t)(atof(argv[3]) * 1e9);
    int opened = 0;
    struct epoll_event ready[1024];
    while (now() < measured_to) {
        /* Spread over the warm-up: streams that began together would also send their chunks together. */
        int64_t open_by_now = 1 + connection_count * (now() - begun) / WARM_UP_NS;
        while (opened < connection_count && opened < open_by_now) open_connection(&all[opened++]);
        int count = epoll_wait(poller, ready, 1024, opened < connection_count ? 1 : 20);
        for (int i = 0; i < count; i++) {
            struct connection *c = ready[i].data.ptr;
            if (c->phase == CONNECTING) connected(c);
            else if (c->phase != CLOSED) readable(c);
        }
    }
    double seconds = (now() - measured_from) / 1e9;
    int waiting = 0;
    for (int i = 0; i < connection_count; i++) waiting += all[i].phase == HEAD || all[i].phase == BODY;
    printf("{\"seconds\": %.3f, \"answers\": %lld, \"chunks\": %lld, \"bytes\": %lld, \"errors\": %lld, \"waiting\": %d, \"last_bad_status\": %d",
        seconds, answers, chunks, bytes, errors, waiting, last_bad_status);
    print_sample("ttft", &ttft);
    print_sample("chunk", &chunk);
    print_sample("total", &total);
    printf("}\n");
    return 0;
}
