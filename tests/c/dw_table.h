/* A flag table and its flags, for tests of nothing else. */
#ifndef DW_TABLE_H
#define DW_TABLE_H

#include "dw_check.h"
#include "dw_flags.h"

static inline dw_flags *make_table(void)
{
    dw_flags *flags;
    CHECK_EQ(dw_flags_create(&flags), DW_OK);
    return flags;
}

static inline dw_flag make_flag(dw_flags *flags)
{
    dw_flag flag;
    CHECK_EQ(dw_flag_alloc(flags, &flag), DW_OK);
    return flag;
}

#endif
