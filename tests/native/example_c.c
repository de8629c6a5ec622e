/* A C extension module whose thread Python knows nothing of: it watches one
 * connection and works until the client leaves.
 *
 *     worker = example_c.Worker(watcher, fd, vanish_ms=0)
 *     worker.join() -> (reason, number of steps, error code)
 *     worker.bound_ms: by when a client that vanishes is told of; 0 never
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>
#include <stdatomic.h>

#include "disconnect_watch.h"

static const dw_api *dw;

typedef struct {
    PyObject_HEAD PyObject
        *watcher; /* our reference keeps the two handles good */
    dw_watcher *handle;
    dw_flags *flags;
    pthread_t thread;
    int is_running;
    int fd;
    unsigned vanish_ms;
    atomic_int bound_ms;
    int rc; /* written by the thread, read after the join, as is reason */
    int reason;
    atomic_ulong num_steps;
} Worker;

static void *work(void *arg)
{
    Worker *self = arg;
    dw_flag flag;
    dw_conn_id conn;
    dw_watch_id watch;
    self->rc = dw->flag_alloc(self->flags, &flag);
    if (self->rc)
        return NULL;
    self->rc = dw->watcher_attach(self->handle, self->fd, &conn);
    if (self->rc)
        goto release;
    if (self->vanish_ms) {
        self->rc = dw->watcher_set_vanish(self->handle, conn, self->vanish_ms);
        if (self->rc)
            goto detach;
        atomic_store(&self->bound_ms,
                     dw->watcher_vanish_bound(self->handle, conn));
    }
    self->rc =
        dw->watcher_arm(self->handle, conn, flag, DW_MASK_ANY, NULL, 0, &watch);
    if (self->rc < 0)
        goto detach;
    const uint32_t *word = dw->flag_address(self->flags, flag.slot);
    while (!dw_flag_is_cancelled(word))
        atomic_fetch_add(&self->num_steps, 1);
    self->reason = dw->flag_reason(self->flags, flag);
    self->rc = dw->watcher_disarm(self->handle, conn, watch);

detach:
    dw->watcher_detach(self->handle, conn);
release:
    dw->flag_release(self->flags, flag);
    return NULL;
}

static int worker_init(PyObject *object, PyObject *args, PyObject *kwargs)
{
    Worker *self = (Worker *)object;
    PyObject *watcher;
    (void)kwargs;
    if (!PyArg_ParseTuple(args, "Oi|I", &watcher, &self->fd, &self->vanish_ms))
        return -1;
    self->handle = dw->watcher_of(watcher, &self->flags);
    if (!self->handle)
        return -1;
    self->watcher = Py_NewRef(watcher);
    if (pthread_create(&self->thread, NULL, work, self)) {
        PyErr_SetString(PyExc_OSError, "start a worker: no thread");
        return -1;
    }
    self->is_running = 1;
    return 0;
}

static void end(Worker *self)
{
    if (!self->is_running)
        return;
    self->is_running = 0;
    Py_BEGIN_ALLOW_THREADS pthread_join(self->thread, NULL);
    Py_END_ALLOW_THREADS
}

static PyObject *worker_join(PyObject *object, PyObject *unused)
{
    Worker *self = (Worker *)object;
    (void)unused;
    end(self);
    return Py_BuildValue("iki", self->reason, atomic_load(&self->num_steps),
                         self->rc);
}

/* Spins with the GIL held: nothing in Python runs until the worker is done. */
static PyObject *worker_join_holding_the_gil(PyObject *object, PyObject *unused)
{
    Worker *self = (Worker *)object;
    pthread_join(self->thread, NULL);
    self->is_running = 0;
    return worker_join(object, unused);
}

static PyObject *worker_num_steps(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromUnsignedLong(atomic_load(&((Worker *)object)->num_steps));
}

static PyObject *worker_bound_ms(PyObject *object, void *unused)
{
    (void)unused;
    return PyLong_FromLong(atomic_load(&((Worker *)object)->bound_ms));
}

static void worker_dealloc(PyObject *object)
{
    Worker *self = (Worker *)object;
    PyTypeObject *type = Py_TYPE(object);
    end(self);
    Py_XDECREF(self->watcher);
    type->tp_free(object);
    Py_DECREF(type);
}

static PyMethodDef worker_methods[] = {
    {"join", worker_join, METH_NOARGS, NULL},
    {"join_holding_the_gil", worker_join_holding_the_gil, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef worker_getset[] = {
    {"num_steps", worker_num_steps, NULL, NULL, NULL},
    {"bound_ms", worker_bound_ms, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot worker_slots[] = {
    {Py_tp_new, (void *)PyType_GenericNew},  {Py_tp_init, (void *)worker_init},
    {Py_tp_dealloc, (void *)worker_dealloc}, {Py_tp_methods, worker_methods},
    {Py_tp_getset, worker_getset},           {0, NULL},
};

static PyType_Spec worker_spec = {
    .name = "example_c.Worker",
    .basicsize = sizeof(Worker),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = worker_slots,
};

/* Cancels a token by a reference of its own, which outlives the object. */
static PyObject *retain_and_cancel(PyObject *module, PyObject *args)
{
    PyObject *token;
    int reason;
    dw_flags *flags;
    dw_flag flag;
    (void)module;
    if (!PyArg_ParseTuple(args, "Oi", &token, &reason) ||
        dw->flag_of(token, &flags, &flag))
        return NULL;
    int rc = dw->flag_retain(flags, flag);
    if (!rc) {
        rc = dw->flag_cancel(flags, flag, (enum dw_reason)reason,
                             dw->clock_ns());
        dw->flag_release(flags, flag);
    }
    if (rc < 0)
        return PyErr_Format(PyExc_OSError, "cancel a token: %s",
                            dw->strerror(rc));
    return PyLong_FromLong(rc);
}

/* What dw_import makes of another table: the checks of a stranger's build. */
static PyObject *import_again(PyObject *module, PyObject *unused)
{
    (void)module;
    (void)unused;
    if (!dw_import())
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"retain_and_cancel", retain_and_cancel, METH_VARARGS, NULL},
    {"import_again", import_again, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "example_c",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit_example_c(void)
{
    dw = dw_import();
    if (!dw)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (!module)
        return NULL;
    PyObject *type = PyType_FromSpec(&worker_spec);
    if (!type || PyModule_AddObjectRef(module, "Worker", type)) {
        Py_XDECREF(type);
        Py_DECREF(module);
        return NULL;
    }
    Py_DECREF(type);
    return module;
}
