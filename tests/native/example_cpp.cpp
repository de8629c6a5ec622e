// A C++ extension module: one connection, a request after another on it, each
// with a flag and a watch that end with their scope.
//
//     example_cpp.serve(watcher, fd, num_requests, num_steps)
//         -> [(steps done, reason), ...]
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <system_error>
#include <utility>
#include <vector>

#include "disconnect_watch.h"

namespace
{

const dw_api *dw;

int check(int rc)
{
    if (rc < 0)
        throw std::system_error(-rc, std::generic_category(), dw->strerror(rc));
    return rc;
}

class Connection
{
  public:
    Connection(dw_watcher *watcher, int fd) : watcher_(watcher)
    {
        check(dw->watcher_attach(watcher_, fd, &id_));
    }
    ~Connection()
    {
        dw->watcher_detach(watcher_, id_);
    }
    Connection(const Connection &) = delete;
    Connection &operator=(const Connection &) = delete;

    dw_watch_id arm(dw_flag flag) const
    {
        dw_watch_id watch;
        check(dw->watcher_arm(watcher_, id_, flag, DW_MASK_ANY, nullptr, 0,
                              &watch));
        return watch;
    }
    void disarm(dw_watch_id watch) const
    {
        dw->watcher_disarm(watcher_, id_, watch);
    }

  private:
    dw_watcher *watcher_;
    dw_conn_id id_ = 0;
};

class Flag
{
  public:
    explicit Flag(dw_flags *flags) : flags_(flags)
    {
        check(dw->flag_alloc(flags_, &name_));
        word_ = dw->flag_address(flags_, name_.slot);
    }
    ~Flag()
    {
        dw->flag_release(flags_, name_);
    }
    Flag(const Flag &) = delete;
    Flag &operator=(const Flag &) = delete;

    dw_flag name() const
    {
        return name_;
    }
    bool is_cancelled() const
    {
        return dw_flag_is_cancelled(word_);
    }
    int reason() const
    {
        return check(dw->flag_reason(flags_, name_));
    }

  private:
    dw_flags *flags_;
    dw_flag name_{};
    const uint32_t *word_;
};

class Request
{
  public:
    Request(const Connection &connection, dw_flags *flags)
        : connection_(connection), flag_(flags),
          watch_(connection.arm(flag_.name()))
    {
    }
    ~Request()
    {
        connection_.disarm(watch_);
    }
    Request(const Request &) = delete;
    Request &operator=(const Request &) = delete;

    std::pair<long, int> run(long num_steps) const
    {
        long step = 0;
        while (step != num_steps && !flag_.is_cancelled())
            step++;
        return {step, flag_.reason()};
    }

  private:
    const Connection &connection_;
    Flag flag_;
    dw_watch_id watch_;
};

std::vector<std::pair<long, int>> serve(dw_watcher *watcher, dw_flags *flags,
                                        int fd, long num_requests,
                                        long num_steps)
{
    std::vector<std::pair<long, int>> results;
    Connection connection(watcher, fd);
    for (long i = 0; i < num_requests; i++)
        results.push_back(Request(connection, flags).run(num_steps));
    return results;
}

PyObject *py_serve(PyObject *, PyObject *args)
{
    PyObject *py_watcher;
    int fd;
    long num_requests, num_steps;
    if (!PyArg_ParseTuple(args, "Oill", &py_watcher, &fd, &num_requests,
                          &num_steps))
        return nullptr;
    // The caller's argument holds the reference until we return.
    dw_flags *flags;
    dw_watcher *watcher = dw->watcher_of(py_watcher, &flags);
    if (!watcher)
        return nullptr;

    std::vector<std::pair<long, int>> results;
    int error = 0;
    PyThreadState *state = PyEval_SaveThread();
    try {
        results = serve(watcher, flags, fd, num_requests, num_steps);
    } catch (const std::system_error &caught) {
        error = caught.code().value();
    }
    PyEval_RestoreThread(state);
    if (error) {
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    }

    PyObject *list = PyList_New(0);
    for (const auto &[steps, reason] : results) {
        PyObject *pair = list ? Py_BuildValue("li", steps, reason) : nullptr;
        if (!pair || PyList_Append(list, pair))
            Py_CLEAR(list);
        Py_XDECREF(pair);
    }
    return list;
}

PyMethodDef functions[] = {
    {"serve", py_serve, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    "example_cpp",
    nullptr,
    -1,
    functions,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

} // namespace

PyMODINIT_FUNC PyInit_example_cpp(void)
{
    dw = dw_import();
    return dw ? PyModule_Create(&definition) : nullptr;
}
