/* A client that connects, sends and leaves on command, and says when it left.
 *
 * Orders come on stdin, answers go to stdout, both in this machine's own
 * layout; end of file on stdin ends it. Its connections are a stack.
 *
 *     order {kind, number, delay_us, settle_us} -> answer {uint64 ns}
 *     'c'  connects to 127.0.0.1:number; answers 0
 *     'r'  sends a request on each of the `number` newest; answers 0
 *     'x'  sleeps delay_us, reads CLOCK_MONOTONIC, closes the newest; sleeps
 *          settle_us, so that the answer does not wake anybody inside the
 *          measured time; answers with the time read just before close()
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static const char request[] = "GET / HTTP/1.1\r\nHost: bench\r\n\r\n";

struct order {
    uint32_t kind;
    uint32_t number;
    uint32_t delay_us;
    uint32_t settle_us;
};

struct stack {
    int *fds;
    size_t size;
    size_t room;
};

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000U + (uint64_t)now.tv_nsec;
}

static void sleep_us(uint32_t us)
{
    struct timespec left = {us / 1000000U, (long)(us % 1000000U) * 1000L};
    while (nanosleep(&left, &left) && errno == EINTR)
        ;
}

static int connect_to(uint32_t port)
{
    struct sockaddr_in address = {.sin_family = AF_INET,
                                  .sin_port = htons((uint16_t)port),
                                  .sin_addr = {htonl(INADDR_LOOPBACK)}};
    int one = 1;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    if (connect(fd, (struct sockaddr *)&address, sizeof(address))) {
        close(fd);
        return -1;
    }
    return fd;
}

static int push(struct stack *stack, int fd)
{
    if (stack->size == stack->room) {
        size_t room = stack->room ? 2 * stack->room : 64;
        int *fds = realloc(stack->fds, room * sizeof(*fds));
        if (!fds)
            return -1;
        stack->fds = fds;
        stack->room = room;
    }
    stack->fds[stack->size++] = fd;
    return 0;
}

static int send_requests(const struct stack *stack, size_t count)
{
    for (size_t i = stack->size - count; i < stack->size; i++) {
        if (send(stack->fds[i], request, sizeof(request) - 1, MSG_NOSIGNAL) < 0)
            return -1;
    }
    return 0;
}

static uint64_t leave(struct stack *stack, const struct order *order)
{
    sleep_us(order->delay_us);
    uint64_t closed_ns = now_ns();
    close(stack->fds[--stack->size]);
    sleep_us(order->settle_us);
    return closed_ns;
}

int main(void)
{
    struct order order;
    struct stack stack = {0};

    while (read(STDIN_FILENO, &order, sizeof(order)) == sizeof(order)) {
        uint64_t answer = 0;
        int rc = 0;
        if (order.kind == 'c') {
            int fd = connect_to(order.number);
            rc = fd < 0 ? -1 : push(&stack, fd);
        } else if (order.kind == 'r' && order.number <= stack.size) {
            rc = send_requests(&stack, order.number);
        } else if (order.kind == 'x' && stack.size) {
            answer = leave(&stack, &order);
        } else {
            errno = EINVAL;
            rc = -1;
        }
        if (rc) {
            fprintf(stderr, "order %c %u with %zu connections: %s\n",
                    (int)order.kind, order.number, stack.size, strerror(errno));
            return 1;
        }
        if (write(STDOUT_FILENO, &answer, sizeof(answer)) != sizeof(answer))
            return 1;
    }
    return 0;
}
