#include "dw_error.h"

#include <string.h>

const char *dw_strerror(int code)
{
    switch (code) {
    case DW_OK:
        return "no error";
    case DW_ENOMEM:
        return "out of memory";
    case DW_EINVAL:
        return "invalid argument";
    case DW_EBADF:
        return "not an open file descriptor";
    case DW_ENOTSOCK:
        return "not a connected stream socket, so it cannot be watched";
    case DW_EEXIST:
        return "this file descriptor is attached already";
    case DW_ENOSPC:
        return "the table is full";
    case DW_ESTALE:
        return "no longer there: its generation has moved on";
    case DW_ECLOSED:
        return "the handle is closed";
    case DW_EFORKED:
        return "made before fork(), so it cannot be used in the child";
    case DW_ETIMEDOUT:
        return "timed out";
    case DW_EINTR:
        return "interrupted by a signal";
    case DW_ENOTSUP:
        return "not supported by this poller or kernel";
    default:
        /* Whatever else the kernel said. glibc and musl both return constant
         * strings for the errno values that exist, so this is thread-safe for
         * every code that can get here. */
        return code < 0 ? strerror(-code) : "not an error code";
    }
}
