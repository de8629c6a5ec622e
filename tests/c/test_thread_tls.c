/* glibc takes the thread-local data of all libraries from a thread's stack, so
 * a small stack can be too small in a process that has loaded much.
 */
#include <string.h>

#include "dw_test.h"
#include "dw_thread.h"

static _Thread_local char big[2 * 1024 * 1024];

static void *touch(void *arg)
{
    memset(big, 1, sizeof big);
    *(char *)arg = big[sizeof big - 1];
    return NULL;
}

TEST(a_thread_starts_however_much_thread_local_data_there_is)
{
    char touched = 0;
    pthread_t thread;

    CHECK_EQ(dw_thread_start(&thread, touch, &touched), DW_OK);
    CHECK(!pthread_join(thread, NULL));
    CHECK_EQ(touched, 1);
}
