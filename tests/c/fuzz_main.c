/* Runs a fuzz target where there is no libFuzzer: on inputs from a generator
 * with a seed, in a child of its own, so that whatever kills it is told with the
 * seed that did.
 *
 *     ./fuzz_watch seconds [first seed]     runs that long
 *     ./fuzz_watch 0 seed                   runs that one input
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include "dw_clock.h"

#define MAX_INPUT 400
#define NS_PER_S  UINT64_C(1000000000)
/* An input that runs for longer hangs. */
#define INPUT_LIMIT_S 30

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Source: S. Vigna, splitmix64 (public domain). */
static uint64_t next(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
    return z ^ (z >> 31);
}

static void run(uint64_t seed)
{
    uint8_t data[MAX_INPUT];
    uint64_t state = seed;
    size_t size = next(&state) % sizeof data;
    for (size_t i = 0; i < size; i++)
        data[i] = (uint8_t)next(&state);
    alarm(INPUT_LIMIT_S);
    LLVMFuzzerTestOneInput(data, size);
}

int main(int argc, char **argv)
{
    uint64_t seconds = argc > 1 ? strtoull(argv[1], NULL, 10) : 10;
    uint64_t first = argc > 2 ? strtoull(argv[2], NULL, 10) : dw_clock_ns();
    /* Shared with the child, which may not live to tell. */
    uint64_t *seed = mmap(NULL, sizeof *seed, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (seed == MAP_FAILED)
        return 2;
    *seed = first;
    uint64_t end_ns = dw_clock_ns() + seconds * NS_PER_S;
    pid_t child = fork();
    if (!child) {
        do {
            run(*seed);
            ++*seed;
        } while (dw_clock_ns() < end_ns);
        exit(0); /* with the leak check */
    }
    int status;
    if (child < 0 || waitpid(child, &status, 0) != child)
        return 2;
    if (status) {
        printf("FAILED (%s): to see it again: %s 0 %llu\n",
               WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "exit",
               argv[0], (unsigned long long)*seed);
        return 1;
    }
    printf("%llu inputs, seeds %llu to %llu\n",
           (unsigned long long)(*seed - first), (unsigned long long)first,
           (unsigned long long)(*seed - 1));
    return 0;
}
