/* Error codes of the C core (disconnect_watch.h has them): negated errno values,
 * so that the binding can raise the OSError the user knows wherever the cause
 * was a system call.
 *
 * RETURNS: every fallible function gives 0 (or a count) on success and one of
 * these, or another negated errno from the kernel, on failure.
 */
#ifndef DW_ERROR_H
#define DW_ERROR_H

#include "disconnect_watch.h"

/* A short sentence without the system's own prefix; never NULL. */
const char *dw_strerror(int code);

#endif
