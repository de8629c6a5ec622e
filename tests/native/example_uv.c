/* A plain libuv server whose connections are watched: it takes requests, never
 * reads again while it works on one, and hears of those who leave through a
 * mailbox whose fd its own loop polls.
 *
 *     example_uv.serve(watcher, listening fd, num_clients) -> [reason, ...]
 *
 * libuv alone would notice nothing here: it reads only where uv_read_start was
 * called, and reading on would mean to buffer what the client pipelines. What
 * it does not read it opts in to see behind, even where the window is full.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdlib.h>
#include <uv.h>

#include "disconnect_watch.h"

#define MAX_CLIENTS 64
#define UNBLIND (1 << 20) /* bytes that a client may send and not see read */

static const dw_api *dw;

typedef struct {
    uv_tcp_t tcp;
    dw_conn_id conn;
    int index;
} client;

typedef struct {
    dw_watcher *watcher;
    dw_mailbox *mailbox;
    uv_loop_t loop;
    uv_tcp_t listening;
    uv_poll_t notify;
    client *clients[MAX_CLIENTS];
    int reasons[MAX_CLIENTS];
    int num_expected;
    int num_accepted;
    int num_gone;
    int rc;
} server;

static void on_client_closed(uv_handle_t *handle)
{
    free(handle->data);
}

static void close_client(server *self, client *it)
{
    self->clients[it->index] = NULL;
    /* Before libuv closes the fd. */
    if (it->conn)
        dw->watcher_detach(self->watcher, it->conn);
    it->tcp.data = it;
    uv_close((uv_handle_t *)&it->tcp, on_client_closed);
}

static void stop(server *self, int rc)
{
    if (rc < 0)
        self->rc = rc;
    if (!uv_is_closing((uv_handle_t *)&self->notify)) {
        uv_close((uv_handle_t *)&self->notify, NULL);
        uv_close((uv_handle_t *)&self->listening, NULL);
    }
    for (int i = 0; i < self->num_accepted; i++) {
        if (self->clients[i])
            close_client(self, self->clients[i]);
    }
}

static void on_mail(uv_poll_t *handle, int status, int events)
{
    server *self = handle->data;
    dw_event mail[8];
    (void)status;
    (void)events;
    int num_mail = dw->mailbox_drain(self->mailbox, mail, 8);
    if (num_mail < 0) {
        stop(self, num_mail);
        return;
    }
    for (int i = 0; i < num_mail; i++) {
        int index = (int)mail[i].cookie;
        self->reasons[index] = (int)mail[i].reason;
        close_client(self, self->clients[index]);
        self->num_gone++;
    }
    if (self->num_gone == self->num_expected)
        stop(self, 0);
}

static void on_connection(uv_stream_t *listening, int status)
{
    server *self = listening->data;
    if (status < 0 || self->num_accepted == self->num_expected)
        return;
    client *it = calloc(1, sizeof(*it));
    if (!it) {
        stop(self, DW_ENOMEM);
        return;
    }
    it->index = self->num_accepted++;
    self->clients[it->index] = it;
    uv_tcp_init(&self->loop, &it->tcp);
    uv_os_fd_t fd;
    dw_watch_id watch;
    int rc = uv_accept(listening, (uv_stream_t *)&it->tcp);
    if (rc == 0)
        rc = uv_fileno((uv_handle_t *)&it->tcp, &fd);
    if (rc == 0)
        rc = dw->watcher_attach(self->watcher, fd, &it->conn);
    if (rc == 0)
        rc = dw->watcher_arm(self->watcher, it->conn, (dw_flag){0, 0},
                             DW_MASK_ANY, self->mailbox, (uint64_t)it->index,
                             &watch);
    /* A server that reads the next request reblinds first. */
    if (rc >= 0)
        rc = dw->watcher_unblind(self->watcher, it->conn, UNBLIND);
    if (rc < 0)
        stop(self, rc);
}

/* RETURNS: 0, or a negated errno: libuv's codes are that too. */
static int run(server *self, int fd)
{
    int rc = dw->mailbox_create(self->watcher, &self->mailbox);
    if (rc < 0)
        return rc;
    rc = uv_loop_init(&self->loop);
    if (rc < 0)
        goto close_mailbox;
    uv_tcp_init(&self->loop, &self->listening);
    uv_poll_init(&self->loop, &self->notify, dw->mailbox_fd(self->mailbox));
    self->listening.data = self;
    self->notify.data = self;
    uv_poll_start(&self->notify, UV_READABLE, on_mail);
    rc = uv_tcp_open(&self->listening, fd);
    if (rc == 0)
        rc = uv_listen((uv_stream_t *)&self->listening, 16, on_connection);
    if (rc < 0)
        stop(self, rc);
    uv_run(&self->loop, UV_RUN_DEFAULT);
    uv_loop_close(&self->loop);
    rc = self->rc;

close_mailbox:
    dw->mailbox_close(self->mailbox);
    return rc;
}

/* Takes fd, which libuv closes. */
static PyObject *serve(PyObject *module, PyObject *args)
{
    PyObject *py_watcher;
    int fd;
    server *self = calloc(1, sizeof(*self));
    (void)module;
    if (!self)
        return PyErr_NoMemory();
    PyObject *result = NULL;
    if (!PyArg_ParseTuple(args, "Oii", &py_watcher, &fd, &self->num_expected))
        goto done;
    if (self->num_expected > MAX_CLIENTS) {
        PyErr_Format(PyExc_ValueError, "serve %d clients: at most %d",
                     self->num_expected, MAX_CLIENTS);
        goto done;
    }
    self->watcher = dw->watcher_of(py_watcher, NULL);
    if (!self->watcher)
        goto done;
    int rc;
    Py_BEGIN_ALLOW_THREADS rc = run(self, fd);
    Py_END_ALLOW_THREADS if (rc < 0)
    {
        PyErr_Format(PyExc_OSError, "serve on fd %d: %s", fd, dw->strerror(rc));
        goto done;
    }
    result = PyList_New(self->num_expected);
    for (int i = 0; result && i < self->num_expected; i++)
        PyList_SetItem(result, i, PyLong_FromLong(self->reasons[i]));

done:
    free(self);
    return result;
}

static PyMethodDef functions[] = {
    {"serve", serve, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "example_uv",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit_example_uv(void)
{
    uv_loop_t first;
    dw = dw_import();
    /* It opens a pipe for signals, which is the process's for ever: not to be
     * taken for a leak of a test. */
    if (dw && uv_loop_init(&first) == 0)
        uv_loop_close(&first);
    return dw ? PyModule_Create(&definition) : NULL;
}
