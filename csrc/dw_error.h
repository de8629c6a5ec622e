/* Error codes of the C core: negated errno values, so that the binding can
 * raise the OSError the user knows wherever the cause was a system call.
 *
 * RETURNS: every fallible function gives 0 (or a count) on success and one of
 * these, or another negated errno from the kernel, on failure.
 */
#ifndef DW_ERROR_H
#define DW_ERROR_H

#include <errno.h>

#define DW_OK        0
#define DW_ENOMEM    (-ENOMEM)
#define DW_EINVAL    (-EINVAL)
#define DW_EBADF     (-EBADF)      /* not an open file descriptor */
#define DW_ENOTSOCK  (-ENOTSOCK)   /* open, but nothing we can watch */
#define DW_EEXIST    (-EEXIST)     /* this fd is attached already */
#define DW_ENOSPC    (-ENOSPC)     /* a fixed table is full */
#define DW_ESTALE    (-ESTALE)     /* the generation has moved on */
#define DW_ECLOSED   (-ESHUTDOWN)  /* the handle was closed */
#define DW_EFORKED   (-EOWNERDEAD) /* made before fork(), used in the child */
#define DW_ETIMEDOUT (-ETIMEDOUT)
#define DW_EINTR     (-EINTR)
#define DW_ENOTSUP   (-EOPNOTSUPP) /* this poller or kernel cannot do it */

/* A short sentence without the system's own prefix; never NULL. */
const char *dw_strerror(int code);

#endif
