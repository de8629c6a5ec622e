/* Keep-alive HTTP load: a number of connections, one request under way on
 * each, until a time is over or a number of requests is answered.
 *
 *     load PORT CONNECTIONS REPLY_BYTES DURATION_MS REQUESTS [REQUEST_FILE]
 *
 * Zero for DURATION_MS or REQUESTS means no such bound. Every reply must be
 * HTTP 200 and have exactly REPLY_BYTES. REQUEST_FILE has the bytes of one
 * request; a small POST without it. Prints "requests nanoseconds".
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MAX_CONNECTIONS 256
#define MAX_REPLY       16384
#define MAX_REQUEST     16384

/* What a Python client library sends, give or take. */
static const char plain_request[] =
    "POST /v2/models/tiny/generate HTTP/1.1\r\n"
    "Host: 127.0.0.1:8000\r\n"
    "User-Agent: load/1\r\n"
    "Accept: */*\r\n"
    "Accept-Encoding: gzip, deflate\r\n"
    "Connection: keep-alive\r\n"
    "Content-Type: application/json\r\n"
    "Content-Length: 44\r\n"
    "\r\n"
    "{\"text_input\":\"a word\",\"max_tokens\":16     }";

static const char status[] = "HTTP/1.1 200";

static char request[MAX_REQUEST];
static size_t request_size;

typedef struct {
    int fd;
    size_t num_received; /* bytes of the reply under way */
    char reply[MAX_REPLY];
} client;

static client clients[MAX_CONNECTIONS];

static void die(const char *what)
{
    fprintf(stderr, "load: %s: %s\n", what, strerror(errno));
    exit(1);
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000U + (uint64_t)now.tv_nsec;
}

static void read_request(const char *path)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        die(path);
    request_size = fread(request, 1, sizeof(request), file);
    if (ferror(file))
        die(path);
    fclose(file);
}

static void send_request(const client *c)
{
    if (send(c->fd, request, request_size, MSG_NOSIGNAL) !=
        (ssize_t)request_size)
        die("send");
}

static void connect_all(int epoll_fd, int num_clients, int port)
{
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)port),
                                  .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int one = 1;

    for (int i = 0; i < num_clients; i++) {
        client *c = &clients[i];
        c->fd = socket(AF_INET, SOCK_STREAM, 0);
        if (c->fd < 0)
            die("socket");
        if (connect(c->fd, (struct sockaddr *)&address, sizeof(address)))
            die("connect");
        setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
        if (epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &event))
            die("epoll_ctl");
    }
}

/* RETURNS: 1 when the reply under way is complete. */
static int take_reply(client *c, size_t reply_size)
{
    ssize_t n = recv(c->fd, c->reply + c->num_received,
                     reply_size - c->num_received, 0);
    if (n < 0)
        die("recv");
    if (n == 0) {
        fprintf(stderr, "load: the server closed the connection\n");
        exit(1);
    }
    c->num_received += (size_t)n;
    if (c->num_received < reply_size)
        return 0;
    c->num_received = 0;
    if (memcmp(c->reply, status, sizeof(status) - 1)) {
        fprintf(stderr, "load: not a 200: %.40s\n", c->reply);
        exit(1);
    }
    return 1;
}

int main(int argc, char **argv)
{
    if (argc != 6 && argc != 7) {
        fprintf(stderr, "usage: load PORT CONNECTIONS REPLY_BYTES "
                        "DURATION_MS REQUESTS [REQUEST_FILE]\n");
        return 2;
    }
    if (argc == 7) {
        read_request(argv[6]);
    } else {
        request_size = sizeof(plain_request) - 1;
        memcpy(request, plain_request, request_size);
    }
    int num_clients = atoi(argv[2]);
    size_t reply_size = (size_t)atoi(argv[3]);
    uint64_t duration_ns = (uint64_t)atoll(argv[4]) * 1000000U;
    uint64_t max_requests = (uint64_t)atoll(argv[5]);
    if (num_clients < 1 || num_clients > MAX_CONNECTIONS ||
        reply_size < sizeof(status) || reply_size > MAX_REPLY ||
        !request_size || request_size == MAX_REQUEST ||
        (!duration_ns && !max_requests)) {
        fprintf(stderr, "load: an argument is out of range\n");
        return 2;
    }

    int epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (epoll_fd < 0)
        die("epoll_create1");
    connect_all(epoll_fd, num_clients, atoi(argv[1]));

    struct epoll_event events[MAX_CONNECTIONS];
    uint64_t num_sent = 0, num_done = 0;
    uint64_t start_ns = now_ns();
    uint64_t end_ns = start_ns;
    for (int i = 0; i < num_clients; i++) {
        if (max_requests && num_sent == max_requests)
            break;
        send_request(&clients[i]);
        num_sent++;
    }
    while (num_done < num_sent) {
        int n = epoll_wait(epoll_fd, events, num_clients, 10000);
        if (n < 0)
            die("epoll_wait");
        if (n == 0) {
            fprintf(stderr, "load: no reply for 10 seconds\n");
            return 1;
        }
        for (int i = 0; i < n; i++) {
            client *c = events[i].data.ptr;
            if (!take_reply(c, reply_size))
                continue;
            num_done++;
            end_ns = now_ns();
            if ((max_requests && num_sent == max_requests) ||
                (duration_ns && end_ns - start_ns >= duration_ns))
                continue;
            send_request(c);
            num_sent++;
        }
    }
    printf("%llu %llu\n", (unsigned long long)num_done,
           (unsigned long long)(end_ns - start_ns));
    return 0;
}
