/* A client that connects and leaves on command, and says when it left.
 *
 * Orders come on stdin, answers go to stdout, both in this machine's own
 * layout; end of file on stdin ends it. It knows one connection at a time.
 *
 *     order {kind, port, delay_us, settle_us} -> answer {uint64 ns}
 *     'c'  connects to 127.0.0.1:port; answers 0
 *     'x'  sleeps delay_us, reads CLOCK_MONOTONIC, closes; sleeps settle_us, so
 *          that the answer does not wake anybody inside the measured time;
 *          answers with the time read just before close()
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

struct order {
    uint32_t kind;
    uint32_t port;
    uint32_t delay_us;
    uint32_t settle_us;
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
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    if (connect(fd, (struct sockaddr *)&address, sizeof(address))) {
        close(fd);
        return -1;
    }
    return fd;
}

int main(void)
{
    struct order order;
    int fd = -1;

    while (read(STDIN_FILENO, &order, sizeof(order)) == sizeof(order)) {
        uint64_t answer = 0;
        if (order.kind == 'c') {
            fd = connect_to(order.port);
            if (fd < 0) {
                fprintf(stderr, "connect to port %u: %s\n", order.port,
                        strerror(errno));
                return 1;
            }
        } else {
            sleep_us(order.delay_us);
            answer = now_ns();
            close(fd);
            sleep_us(order.settle_us);
        }
        if (write(STDOUT_FILENO, &answer, sizeof(answer)) != sizeof(answer))
            return 1;
    }
    return 0;
}
