/* An upstream for benchmarks: answers OpenAI-shaped requests with as little work as possible, from one thread.
 *
 * Usage: mock PORT
 *
 * The words of a request say how it is answered: "chunks=N" and "delay_us=D" (pause between two chunks of a stream),
 * "hang" (no answer at all), "size=BYTES" (of each chunk's text). A stream is one when the body holds "stream": true.
 * Each chunk carries the CLOCK_MONOTONIC time of its sending in nanoseconds, as "@<19 digits>".
 * GET /open answers how many requests are being answered or hang, and GET anything else is healthy.
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

#define MAX_FDS 65536
#define HIGH_WATER (256 << 10)
#define MAX_CHUNK_TEXT (64 << 10)

enum phase { READING, STREAMING, HANGING };

struct connection {
    enum phase phase;
    char *in;
    size_t in_used, in_room;
    char *out;
    size_t out_used, out_sent, out_room;
    int chunks_left, chunk_size;
    int64_t delay, due;
    int heap_at; /* place in the heap of streams that wait for their time; -1: in none */
};

static struct connection *connections[MAX_FDS];
static int heap[MAX_FDS], heap_used;
static int poller, open_requests;
static char whole_answer[4096];

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

/* ---- the heap: streams by the time of their next chunk ---- */

static void place(int at, int fd)
{
    heap[at] = fd;
    connections[fd]->heap_at = at;
}

static int64_t due(int at) { return connections[heap[at]]->due; }

static void swap_places(int a, int b)
{
    int fd = heap[a];
    place(a, heap[b]);
    place(b, fd);
}

static void sift(int at)
{
    while (at > 0 && due(at) < due((at - 1) / 2)) {
        swap_places(at, (at - 1) / 2);
        at = (at - 1) / 2;
    }
    for (;;) {
        int least = at;
        for (int child = 2 * at + 1; child <= 2 * at + 2; child++)
            if (child < heap_used && due(child) < due(least)) least = child;
        if (least == at) return;
        swap_places(at, least);
        at = least;
    }
}

static void wait_for(int fd, int64_t when)
{
    struct connection *c = connections[fd];
    c->due = when;
    if (c->heap_at < 0) place(heap_used++, fd);
    sift(c->heap_at);
}

static void stop_waiting(int fd)
{
    int at = connections[fd]->heap_at;
    if (at < 0) return;
    connections[fd]->heap_at = -1;
    if (at == --heap_used) return;
    place(at, heap[heap_used]);
    sift(at);
}

/* ---- writing ---- */

static void watch(int fd, int writable)
{
    struct epoll_event event = {.events = EPOLLIN | (writable ? EPOLLOUT : 0), .data.fd = fd};
    epoll_ctl(poller, EPOLL_CTL_MOD, fd, &event);
}

static int flush(int fd)
{
    struct connection *c = connections[fd];
    while (c->out_sent < c->out_used) {
        ssize_t sent = send(fd, c->out + c->out_sent, c->out_used - c->out_sent, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno != EAGAIN) return -1;
            watch(fd, 1);
            return 0;
        }
        c->out_sent += sent;
    }
    if (c->out_room > 0 && c->out_used > 0) watch(fd, 0);
    c->out_used = c->out_sent = 0;
    return 0;
}

static int put(int fd, const char *bytes, size_t count)
{
    struct connection *c = connections[fd];
    if (c->out_used == 0) {
        ssize_t sent = send(fd, bytes, count, MSG_NOSIGNAL);
        if (sent == (ssize_t)count) return 0;
        if (sent < 0 && errno != EAGAIN) return -1;
        if (sent > 0) bytes += sent, count -= sent;
    }
    if (c->out_used + count > c->out_room) {
        c->out_room = 2 * (c->out_used + count);
        c->out = realloc(c->out, c->out_room);
    }
    memcpy(c->out + c->out_used, bytes, count);
    c->out_used += count;
    return flush(fd);
}

/* ---- answers ---- */

static int stream(int fd)
{
    static char text[MAX_CHUNK_TEXT + 512], frame[MAX_CHUNK_TEXT + 1024], padding[MAX_CHUNK_TEXT];
    static const char end[] = "e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n";
    struct connection *c = connections[fd];
    if (!padding[0]) memset(padding, 'x', sizeof padding);
    while (c->chunks_left > 0) {
        if (c->out_used - c->out_sent > HIGH_WATER) return 0; /* the reader is slow; flush() comes back */
        int length = sprintf(text,
            "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1700000000,\"model\":\"bench\","
            "\"choices\":[{\"index\":0,\"delta\":{\"content\":\"@%019lld%.*s\"},\"finish_reason\":null}]}\n\n",
            (long long)now(), c->chunk_size, padding);
        int framed = sprintf(frame, "%x\r\n%s\r\n", length, text);
        if (put(fd, frame, framed) < 0) return -1;
        if (--c->chunks_left > 0 && c->delay > 0) {
            wait_for(fd, c->due + c->delay);
            return 0;
        }
    }
    c->phase = READING;
    open_requests--;
    return put(fd, end, sizeof end - 1);
}

static long number_after(const char *body, size_t size, const char *name, long otherwise)
{
    const char *found = memmem(body, size, name, strlen(name));
    return found ? strtol(found + strlen(name), NULL, 10) : otherwise;
}

static int is_stream(const char *body, size_t size)
{
    const char *found = memmem(body, size, "\"stream\"", 8);
    if (!found) return 0;
    for (found += 8; found < body + size && (*found == ' ' || *found == ':'); found++) {}
    return found + 4 <= body + size && memcmp(found, "true", 4) == 0;
}

static int answer(int fd, const char *head, const char *body, size_t size)
{
    static const char begin[] = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    struct connection *c = connections[fd];
    if (memcmp(head, "GET ", 4) == 0) {
        char text[64], reply[256];
        int length = memcmp(head, "GET /open ", 10) == 0
            ? sprintf(text, "{\"open\":%d}", open_requests)
            : sprintf(text, "{\"status\":\"ok\"}");
        int count = sprintf(reply, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s", length, text);
        return put(fd, reply, count);
    }
    if (memmem(body, size, "hang", 4)) {
        c->phase = HANGING;
        open_requests++;
        return 0;
    }
    if (!is_stream(body, size)) return put(fd, whole_answer, strlen(whole_answer));
    c->phase = STREAMING;
    open_requests++;
    c->chunks_left = number_after(body, size, "chunks=", 100);
    c->delay = number_after(body, size, "delay_us=", 0) * 1000;
    c->chunk_size = number_after(body, size, "size=", 16);
    if (c->chunk_size > MAX_CHUNK_TEXT) c->chunk_size = MAX_CHUNK_TEXT;
    c->due = now();
    if (put(fd, begin, sizeof begin - 1) < 0) return -1;
    return stream(fd);
}

/* ---- reading ---- */

/* Size of a chunked body at `body` if it is whole, else 0. Routers send bodies that way at times. */
static size_t chunked_size(const char *body, size_t available)
{
    const char *end = memmem(body, available, "0\r\n\r\n", 5);
    return end ? (size_t)(end - body) + 5 : 0;
}

static int serve(int fd)
{
    struct connection *c = connections[fd];
    while (c->phase == READING && c->in_used > 0) {
        char *end = memmem(c->in, c->in_used, "\r\n\r\n", 4);
        if (!end) return 0;
        *end = 0;
        char *length = strcasestr(c->in, "\r\ncontent-length:");
        int chunked = strcasestr(c->in, "\r\ntransfer-encoding:") != NULL;
        *end = '\r';
        size_t head = end - c->in + 4, size = 0;
        if (length) size = strtoul(length + 17, NULL, 10);
        else if (chunked && !(size = chunked_size(c->in + head, c->in_used - head))) return 0;
        if (c->in_used < head + size) return 0;
        if (answer(fd, c->in, c->in + head, size) < 0) return -1;
        memmove(c->in, c->in + head + size, c->in_used - head - size);
        c->in_used -= head + size;
    }
    return 0;
}

static int readable(int fd)
{
    struct connection *c = connections[fd];
    if (c->in_room - c->in_used < 16384) {
        c->in_room = 2 * c->in_room + 32768;
        c->in = realloc(c->in, c->in_room);
    }
    ssize_t got = recv(fd, c->in + c->in_used, c->in_room - c->in_used - 1, 0);
    if (got <= 0) return got < 0 && errno == EAGAIN ? 0 : -1;
    c->in_used += got;
    return serve(fd);
}

static void end_connection(int fd)
{
    struct connection *c = connections[fd];
    if (c->phase != READING) open_requests--;
    stop_waiting(fd);
    close(fd);
    free(c->in);
    free(c->out);
    free(c);
    connections[fd] = NULL;
}

static void accept_all(int listener)
{
    int fd, one = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
        if (fd >= MAX_FDS) {
            close(fd);
            continue;
        }
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        connections[fd] = calloc(1, sizeof(struct connection));
        connections[fd]->heap_at = -1;
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &event);
    }
}

static void make_whole_answer(void)
{
    char text[2048], words[801];
    memset(words, 'x', 800);
    words[800] = 0;
    sprintf(text,
        "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1700000000,\"model\":\"bench\",\"choices\":[{\"index\":0,"
        "\"message\":{\"role\":\"assistant\",\"content\":\"%s\"},\"finish_reason\":\"stop\"}],"
        "\"usage\":{\"prompt_tokens\":12,\"completion_tokens\":200,\"total_tokens\":212}}", words);
    sprintf(whole_answer, "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s", strlen(text), text);
}

int main(int argc, char **argv)
{
    if (argc != 2) {
        fprintf(stderr, "usage: mock PORT\n");
        return 2;
    }
    signal(SIGPIPE, SIG_IGN);
    make_whole_answer();
    int one = 1, listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 16384)) {
        perror("mock");
        return 1;
    }
    poller = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN, .data.fd = listener}, ready[1024];
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        int wait_ms = -1;
        if (heap_used) {
            int64_t left = due(0) - now();
            wait_ms = left <= 0 ? 0 : (int)(left / 1000000); /* rounded down: late by none, early turns are cheap */
        }
        int count = epoll_wait(poller, ready, 1024, wait_ms);
        for (int i = 0; i < count; i++) {
            int fd = ready[i].data.fd;
            if (fd == listener) accept_all(listener);
            else if (connections[fd] && ((ready[i].events & (EPOLLERR | EPOLLHUP)) || ((ready[i].events & EPOLLIN) && readable(fd) < 0) ||
                     ((ready[i].events & EPOLLOUT) && (flush(fd) < 0 ||
                      (connections[fd]->phase == STREAMING && connections[fd]->heap_at < 0 && stream(fd) < 0)))))
                end_connection(fd);
        }
        int64_t t = now();
        while (heap_used && due(0) <= t) {
            int fd = heap[0];
            stop_waiting(fd);
            if (stream(fd) < 0) end_connection(fd);
        }
    }
}
