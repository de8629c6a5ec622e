/* The flag table as a whole: made, mapped from another process, counted, freed. */
#include "dw_flags_table.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW)

/* Takes memfd, also on failure. */
static int flags_open(int memfd, dw_flags **out)
{
    int rc;
    dw_flags *flags = malloc(sizeof *flags);
    if (!flags) {
        rc = DW_ENOMEM;
        goto fail_close;
    }
    flags->memfd = memfd;
    flags->table = mmap(NULL, sizeof(dw_flags_table), PROT_READ | PROT_WRITE,
                        MAP_SHARED, memfd, 0);
    if (flags->table == MAP_FAILED) {
        rc = -errno;
        goto fail_free;
    }
    flags->local = mmap(NULL, sizeof(dw_flags_local), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (flags->local == MAP_FAILED) {
        rc = -errno;
        goto fail_unmap_table;
    }
    if (madvise(flags->local, sizeof(dw_flags_local), MADV_WIPEONFORK)) {
        rc = DW_ENOTSUP; /* Linux before 4.14 */
        goto fail_unmap_local;
    }
    *out = flags;
    return DW_OK;

fail_unmap_local:
    munmap(flags->local, sizeof(dw_flags_local));
fail_unmap_table:
    munmap(flags->table, sizeof(dw_flags_table));
fail_free:
    free(flags);
fail_close:
    close(memfd);
    return rc;
}

int dw_flags_create(dw_flags **out)
{
    *out = NULL;
    int memfd =
        memfd_create("disconnect-watch", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (memfd < 0)
        return -errno;
    /* Sealed, so that no process can shrink the file under another's mapping
     * and have it die of SIGBUS. */
    if (ftruncate(memfd, sizeof(dw_flags_table)) ||
        fcntl(memfd, F_ADD_SEALS, SEALS | F_SEAL_SEAL)) {
        int rc = -errno;
        close(memfd);
        return rc;
    }
    int rc = flags_open(memfd, out);
    if (rc)
        return rc;
    dw_flags_table *table = (*out)->table;
    table->magic = TABLE_MAGIC;
    table->layout = TABLE_LAYOUT;
    table->num_slots = DW_FLAGS_NUM_SLOTS;
    return DW_OK;
}

int dw_flags_map(int memfd, dw_flags **out)
{
    *out = NULL;
    struct stat stat;
    if (fstat(memfd, &stat))
        return -errno;
    int seals = fcntl(memfd, F_GET_SEALS);
    if (seals < 0 || (seals & SEALS) != SEALS ||
        stat.st_size != (off_t)sizeof(dw_flags_table))
        return DW_EINVAL;
    int own = fcntl(memfd, F_DUPFD_CLOEXEC, 3);
    if (own < 0)
        return -errno;
    int rc = flags_open(own, out);
    if (rc)
        return rc;
    const dw_flags_table *table = (*out)->table;
    if (table->magic != TABLE_MAGIC || table->layout != TABLE_LAYOUT ||
        table->num_slots != DW_FLAGS_NUM_SLOTS) {
        dw_flags_free(*out);
        *out = NULL;
        return DW_EINVAL;
    }
    return DW_OK;
}

void dw_flags_free(dw_flags *flags)
{
    if (!flags)
        return;
    dw_flags_abandon(flags);
    munmap(flags->local, sizeof(dw_flags_local));
    munmap(flags->table, sizeof(dw_flags_table));
    close(flags->memfd);
    free(flags);
}

int dw_flags_memfd(const dw_flags *flags)
{
    return flags->memfd;
}

void dw_flags_read_stats(const dw_flags *flags, dw_flags_stats *out)
{
    dw_flags_table *table = flags->table;
    *out = (dw_flags_stats){
        .num_retired =
            atomic_load_explicit(&table->num_retired, memory_order_relaxed),
        .num_cancels =
            atomic_load_explicit(&table->num_cancels, memory_order_relaxed),
        .num_stale =
            atomic_load_explicit(&table->num_stale, memory_order_relaxed),
    };
    /* Counted here rather than at every alloc, and only where some process
     * ever took a slot: reading an untouched page would allocate it. */
    for (uint32_t slot = 0; slot < DW_FLAGS_NUM_SLOTS; slot++) {
        if (!atomic_load_explicit(&table->owners[slot / DW_FLAGS_RANGE_SLOTS],
                                  memory_order_relaxed)) {
            slot += DW_FLAGS_RANGE_SLOTS - 1;
            continue;
        }
        uint64_t refs =
            atomic_load_explicit(&table->refs[slot], memory_order_relaxed);
        if (refs_are_live(refs, refs_generation(refs)))
            out->num_live++;
    }
}
