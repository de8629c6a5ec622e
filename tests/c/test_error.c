#include <stdlib.h>
#include <string.h>

#include "dw_clock.h"
#include "dw_error.h"
#include "dw_test.h"

TEST(every_code_of_ours_has_a_sentence_of_its_own)
{
    const int codes[] = {
        DW_OK,     DW_ENOMEM,  DW_EINVAL,    DW_EBADF,   DW_ENOTSOCK,
        DW_EEXIST, DW_ENOSPC,  DW_ESTALE,    DW_ECLOSED, DW_EFORKED,
        DW_EINTR,  DW_ENOTSUP, DW_ETIMEDOUT,
    };
    const size_t num_codes = sizeof codes / sizeof codes[0];
    for (size_t i = 0; i < num_codes; i++) {
        const char *said = dw_strerror(codes[i]);
        CHECK(strlen(said) > 0);
        /* The system's own words would be right for none of these. */
        CHECK(codes[i] == DW_ENOMEM || strcmp(said, strerror(-codes[i])));
        for (size_t j = 0; j < i; j++)
            CHECK(strcmp(said, dw_strerror(codes[j])));
    }
}

TEST(other_kernel_errors_are_told_in_the_systems_words)
{
    CHECK_STR(dw_strerror(-EMFILE), strerror(EMFILE));
}

TEST(a_positive_number_is_no_error_code)
{
    CHECK_STR(dw_strerror(EMFILE), "not an error code");
}

TEST(the_clock_runs_forward_from_the_monotonic_one)
{
    uint64_t last = dw_clock_ns();
    for (int i = 0; i < 1000; i++) {
        uint64_t now = dw_clock_ns();
        CHECK(now >= last);
        last = now;
    }
}
