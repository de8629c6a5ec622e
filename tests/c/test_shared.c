/* What threads of a binding look at without a lock. */
#include "dw_shared.h"

#include <pthread.h>

#include "dw_test.h"

#define NUM_THREADS 4
#define NUM_ROUNDS  2000

TEST(the_first_pointer_stays_and_is_what_all_get)
{
    int first, second;
    dw_once once = {NULL};
    CHECK(!dw_once_load(&once));
    CHECK(dw_once_set(&once, &first) == &first);
    CHECK(dw_once_set(&once, &second) == &first);
    CHECK(dw_once_load(&once) == &first);
}

/* Each thread makes a thing of its own in every round. */
typedef struct {
    dw_once *onces; /* [NUM_ROUNDS] */
    pthread_barrier_t *start;
    int made[NUM_ROUNDS];
    const int *got[NUM_ROUNDS];
} first_user;

static void *use_first(void *arg)
{
    first_user *it = arg;
    pthread_barrier_wait(it->start);
    for (int i = 0; i < NUM_ROUNDS; i++) {
        it->made[i] = i + 1;
        it->got[i] = dw_once_load(&it->onces[i]);
        if (!it->got[i])
            it->got[i] = dw_once_set(&it->onces[i], &it->made[i]);
        CHECK_EQ(*it->got[i], i + 1);
    }
    return NULL;
}

TEST(many_first_users_get_the_same_and_see_all_of_it)
{
    static dw_once onces[NUM_ROUNDS];
    static first_user users[NUM_THREADS];
    pthread_t threads[NUM_THREADS];
    pthread_barrier_t start;
    CHECK(!pthread_barrier_init(&start, NULL, NUM_THREADS));
    for (int t = 0; t < NUM_THREADS; t++) {
        users[t].onces = onces;
        users[t].start = &start;
        CHECK(!pthread_create(&threads[t], NULL, use_first, &users[t]));
    }
    for (int t = 0; t < NUM_THREADS; t++)
        pthread_join(threads[t], NULL);
    pthread_barrier_destroy(&start);
    for (int t = 1; t < NUM_THREADS; t++)
        for (int i = 0; i < NUM_ROUNDS; i++)
            CHECK(users[t].got[i] == users[0].got[i]);
}
