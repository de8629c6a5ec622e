#include "dw_base.h"

#ifdef DW_TESTING
void (*dw_sync_hook)(const char *point, void *arg);
void *dw_sync_arg;
#endif
