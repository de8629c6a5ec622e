#include "dw_base.h"

#ifdef DW_TESTING
void (*dw_sync_hook)(const char *point, void *arg);
void *dw_sync_arg;
#endif

/* ISO C wants a declaration in every translation unit; without DW_TESTING this
 * one has no other. */
typedef int dw_base_is_not_empty;
