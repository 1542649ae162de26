/* The hot path of the hook: enters and leaves phases, and records steps.
 *
 * For the values that almost every step has (ints, floats and None), it writes the same bytes as rank/phases.py,
 * StepRecord.pack_into and FlightWriter.append. It leaves all other values to them. One test suite runs against both.
 *
 * The layout is that of flight_recorder/layout.py. With LAYOUT below, Python rejects a module built for another one.
 * All calls hold the GIL and run no Python code while the header's sequence lock is odd, so the rank's other threads
 * see them as atomic. Counts are in the file, where FlightWriter keeps them too.
 */
#include "_hot.h"

/* How often Python notifies the supervisor itself, and journals what the hook has cost since the last time. */
static const double HOUSEKEEPING_S = 1.0;

static PyObject *phase_names; /* the names of the columns, set by Python */

/* Time and header. */

static double clock_seconds(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Return the time in seconds, or -1 with an exception set. */
static double now_of(Phases *self)
{
    if (self->monotonic == NULL)
        return clock_seconds(CLOCK_MONOTONIC);
    PyObject *answer = PyObject_CallNoArgs(self->monotonic);
    if (answer == NULL)
        return -1.0;
    double now = PyFloat_AsDouble(answer);
    Py_DECREF(answer);
    return now;
}

static Header *header_of(Phases *self)
{
    return self->map.obj == NULL ? NULL : (Header *)((char *)self->map.buf + HEADER_OFFSET);
}

/* Make the lock odd. It is already odd if another thread was interrupted while writing; that thread releases it. */
static int begin_write(Header *header)
{
    int mine = !(header->lock & 1);
    if (mine)
        __atomic_store_n(&header->lock, header->lock + 1, __ATOMIC_RELEASE);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return mine;
}

static void end_write(Header *header, int mine)
{
    if (mine)
        __atomic_store_n(&header->lock, header->lock + 1, __ATOMIC_RELEASE);
}

static void show_phase(Phases *self, const char *name, double since, double heartbeat, double allowance)
{
    Header *header = header_of(self);
    if (header == NULL)
        return;
    int mine = begin_write(header);
    memcpy(header->phase, name, NAME_SIZE);
    header->since = since;
    header->heartbeat = heartbeat;
    header->allowance = allowance;
    end_write(header, mine);
}

/* Phases. */

static void count_phase(Phases *self, int depth, double now)
{
    Open *open = &self->open[depth];
    int column = open->phase->column;
    for (int outer = 0; outer < depth; outer++)
        if (self->open[outer].phase->column == column)
            return;
    self->seconds[column] += now - open->counted_to;
    if (depth && self->open[depth - 1].phase->column == self->monitor)
        self->nested += now - open->counted_to;
}

/* Clear the current exception and keep it for the next step to report; the miner must not see it. */
static void keep_error(Phases *self)
{
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (self->failed == NULL && value != NULL)
        self->failed = Py_NewRef(value);
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
}

int hot_is_mine(Phases *self)
{
    return self != NULL && self->live && self->owner == PyThread_get_thread_ident();
}

void hot_enter(Phase *phase)
{
    Phases *self = phase->phases;
    if (!hot_is_mine(self))
        return;
    if (self->depth >= MAX_OPEN) {
        PyErr_Format(PyExc_OverflowError, "%d phases are open (the limit); %.24s is not counted", MAX_OPEN, phase->name);
        keep_error(self);
        return;
    }
    double now = now_of(self);
    if (PyErr_Occurred()) {
        keep_error(self);
        return;
    }
    Open *open = &self->open[self->depth];
    open->phase = (Phase *)Py_NewRef((PyObject *)phase);
    open->since = open->counted_to = now;
    open->until = now + phase->longest;
    open->allowance = phase->allowance;
    /* A nested phase inherits a longer deadline: a validation, for example, has its own data and forward phases. */
    if (self->depth && open[-1].until > open->until) {
        open->until = open[-1].until;
        open->allowance = open->until - now;
    }
    self->depth++;
    show_phase(self, phase->name, now, now, open->allowance);
}

static PyObject *phase_enter(Phase *phase, PyObject *Py_UNUSED(unused))
{
    hot_enter(phase);
    return Py_NewRef((PyObject *)phase);
}

static const char between_phases[NAME_SIZE];

void hot_leave(Phase *phase)
{
    Phases *self = phase->phases;
    if (!hot_is_mine(self))
        return;
    double now = now_of(self);
    if (PyErr_Occurred()) {
        keep_error(self);
        return;
    }
    int depth = self->depth - 1;
    while (depth >= 0 && self->open[depth].phase != phase)
        depth--;
    if (depth >= 0) {
        /* Leave the phases that are still open inside it, too. */
        for (int top = self->depth - 1; top >= depth; top--)
            count_phase(self, top, now);
        int entered = self->depth;
        self->depth = depth;
        for (int top = entered - 1; top >= depth; top--)
            Py_DECREF(self->open[top].phase);
    }
    if (self->depth) {
        Open *outer = &self->open[self->depth - 1];
        show_phase(self, outer->phase->name, outer->since, now, outer->allowance);
    } else {
        show_phase(self, between_phases, now, now, NAN);
    }
}

static PyObject *phase_exit(Phase *phase, PyObject *const *Py_UNUSED(error), Py_ssize_t Py_UNUSED(count))
{
    hot_leave(phase);
    Py_RETURN_NONE;
}

/* Steps. */

/* Store in *number an int that fits a record, or -1 for None. Returns 0 for any other value. */
static int plain_int(PyObject *value, int64_t *number)
{
    *number = -1;
    if (value == Py_None)
        return 1;
    if (!PyLong_CheckExact(value))
        return 0;
    int overflow;
    *number = PyLong_AsLongLongAndOverflow(value, &overflow);
    return !overflow;
}

/* Store in *number a float, or NaN for None. Returns 0 for any other value. */
static int plain_float(PyObject *value, double *number)
{
    *number = NAN;
    if (value == Py_None)
        return 1;
    if (!PyFloat_CheckExact(value))
        return 0;
    *number = PyFloat_AS_DOUBLE(value);
    return 1;
}

/* Read the allocated and reserved bytes; NaN if CUDA is not in use. Returns 0 on failure; sets no exception. */
static int read_memory(Phases *self, double *allocated, double *reserved)
{
    *allocated = *reserved = NAN;
    PyObject *cuda = PyDict_GetItem(self->modules, self->cuda);
    if (cuda == NULL)
        return 1;
    /* Check what torch.cuda.is_initialized() checks first, without calling Python. */
    if (PyModule_Check(cuda) && PyDict_GetItemString(PyModule_GetDict(cuda), "_initialized") == Py_False)
        return 1;
    PyObject *pair = PyObject_CallNoArgs(self->memory);
    int read = pair != NULL && PyTuple_Check(pair) && PyTuple_GET_SIZE(pair) == 2
        && plain_float(PyTuple_GET_ITEM(pair, 0), allocated) && plain_float(PyTuple_GET_ITEM(pair, 1), reserved);
    Py_XDECREF(pair);
    PyErr_Clear();
    return read;
}

static int remember_loss(Phases *self, PyObject *given, const StepRow *row)
{
    PyObject *value = Py_NewRef(given);
    /* HF Trainer reports a NaN loss as 0.0; the gate must not treat that as a real loss. */
    if (row->loss == 0.0 && (row->flags & FLAG_GRAD_NORM_GIVEN) && !isfinite(row->grad_norm))
        Py_SETREF(value, PyFloat_FromDouble(NAN));
    PyObject *done = value == NULL ? NULL : PyObject_CallOneArg(self->remember, value);
    Py_XDECREF(value);
    Py_XDECREF(done);
    PyErr_Clear();
    return done != NULL;
}

static void take_phases(Phases *self, double now, StepRow *row)
{
    for (int depth = 0; depth < self->depth; depth++) {
        count_phase(self, depth, now);
        self->open[depth].counted_to = now;
    }
    for (int column = 0; column < PHASE_COUNT; column++) {
        row->phases[column] = (float)self->seconds[column];
        if (self->seconds[column] > 0)
            row->flags |= self->flags[column];
    }
    row->nested_in_monitor = (float)self->nested;
    memset(self->seconds, 0, sizeof self->seconds);
    self->nested = 0;
}

static void append_row(Phases *self, StepRow *row)
{
    Header *header = header_of(self);
    if (header == NULL)
        return;
    uint64_t number = header->steps;
    row->sequence = number + 1;
    row->check = (uint32_t)(number * 2654435761ULL) ^ (uint32_t)row->inner_step ^ (uint32_t)(int64_t)(row->end * 1000);
    memcpy((char *)self->map.buf + RING_OFFSET + number % RING_SLOTS * STEP_SIZE, row, STEP_BYTES);
    int mine = begin_write(header);
    header->state = STATE_RUNNING;
    if (!header->phase[0])
        header->since = row->end;
    header->heartbeat = row->end;
    header->outer_step = row->outer_step;
    header->inner_step = row->inner_step;
    header->total_steps = row->total_steps;
    header->loss = row->loss;
    header->lr = row->lr;
    header->allocated = row->allocated;
    header->steps = number + 1;
    end_write(header, mine);
}

/* Notify the supervisor. Returns 0 if Python must do it, because the datagram could not be sent or because it is time
 * to journal the hook's own costs. */
static int notify(Phases *self, double now)
{
    if (self->socket < 0 || now - self->kept_house >= HOUSEKEEPING_S) {
        self->kept_house = now;
        return 0;
    }
    return sendto(self->socket, self->notification, self->notification_size, MSG_DONTWAIT | MSG_NOSIGNAL,
                  (struct sockaddr *)&self->supervisor, sizeof self->supervisor) >= 0;
}

int hot_step(Phases *self, const Given *given)
{
    StepRow row;
    if (self->failed != NULL)
        return 0;
    if (!(plain_int(given->outer_step, &row.outer_step) && plain_int(given->inner_step, &row.inner_step)
          && plain_int(given->total_steps, &row.total_steps) && plain_float(given->loss, &row.loss)
          && plain_float(given->lr, &row.lr) && plain_float(given->grad_norm, &row.grad_norm)
          && plain_float(given->eval_loss, &row.eval_loss) && plain_int(given->tokens, &row.tokens)
          && read_memory(self, &row.allocated, &row.reserved)))
        return 0;
    double now = now_of(self);
    if (PyErr_Occurred()) {
        PyErr_Clear();
        return 0;
    }
    row.flags = (self->count ? 0 : FLAG_FIRST) | (given->loss == Py_None ? 0 : FLAG_LOSS_GIVEN)
        | (given->grad_norm == Py_None ? 0 : FLAG_GRAD_NORM_GIVEN)
        | (given->eval_loss == Py_None ? 0 : FLAG_EVAL_LOSS_GIVEN);
    if (given->loss != Py_None && !remember_loss(self, given->loss, &row))
        return 0;
    if (self->depth == 0)
        self->owner = PyThread_get_thread_ident();
    take_phases(self, now, &row);
    self->count++;
    if (given->total_steps == Py_None)
        row.total_steps = self->count;
    row.start = self->started;
    row.end = now;
    row.wall = clock_seconds(CLOCK_REALTIME);
    append_row(self, &row);
    self->started = now;
    int due = self->signal && PyOS_getsig(self->signal) != self->handler;
    if (now - self->notified >= self->notify_every) {
        self->notified = now;
        due |= !notify(self, now);
    }
    double ended = now_of(self);
    PyErr_Clear();
    self->own += ended > now ? ended - now : 0.0;
    self->own_count++;
    return due ? 2 : 1;
}

PyDoc_STRVAR(step_doc,
"step(outer_step, inner_step, total_steps, loss, lr, grad_norm, eval_loss, tokens)\n\n"
"Record the step that ends now. Returns 0 if it was not recorded, because a value is neither None nor a plain number,\n"
"or an error must be reported first; 1 if it was recorded; 2 if it was recorded and the caller must now notify the\n"
"supervisor, journal the costs and check the signal.");

static PyObject *phases_step(Phases *self, PyObject *const *given, Py_ssize_t count)
{
    if (count != 8)
        return PyLong_FromLong(0);
    Given values = {given[0], given[1], given[2], given[3], given[4], given[5], given[6], given[7]};
    return PyLong_FromLong(hot_step(self, &values));
}

PyDoc_STRVAR(reach_doc,
"reach(fd, path, notification)\n\n"
"Send this notification through the datagram socket `fd` to `path`. If `fd` is -1, the caller of `step` sends it.");

static PyObject *phases_reach(Phases *self, PyObject *args)
{
    int fd;
    const char *path, *notification;
    Py_ssize_t path_size, size;
    if (!PyArg_ParseTuple(args, "iy#y#", &fd, &path, &path_size, &notification, &size))
        return NULL;
    if ((size_t)path_size >= sizeof self->supervisor.sun_path || size > NOTIFICATION_SIZE) {
        PyErr_SetString(PyExc_ValueError, "the path exceeds 107 bytes, or the notification exceeds 64");
        return NULL;
    }
    memset(&self->supervisor, 0, sizeof self->supervisor);
    self->supervisor.sun_family = AF_UNIX;
    memcpy(self->supervisor.sun_path, path, (size_t)path_size);
    memcpy(self->notification, notification, (size_t)size);
    self->notification_size = (size_t)size;
    self->socket = fd;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(watch_doc, "watch(signal)\n\nMake `step` return 2 once the signal's handler has changed.");

static PyObject *phases_watch(Phases *self, PyObject *argument)
{
    long number = PyLong_AsLong(argument);
    if (PyErr_Occurred())
        return NULL;
    self->signal = (int)number;
    self->handler = number ? PyOS_getsig((int)number) : NULL;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(take_doc, "take(now)\n\nReturn (seconds by phase since the last call, seconds nested in monitor).");

static PyObject *phases_take(Phases *self, PyObject *argument)
{
    double now = PyFloat_AsDouble(argument);
    if (PyErr_Occurred())
        return NULL;
    StepRow row = {0};
    double seconds[PHASE_COUNT], nested;
    for (int depth = 0; depth < self->depth; depth++) {
        count_phase(self, depth, now);
        self->open[depth].counted_to = now;
    }
    memcpy(seconds, self->seconds, sizeof seconds);
    nested = self->nested;
    take_phases(self, now, &row);
    PyObject *by_name = PyDict_New();
    for (int column = 0; by_name != NULL && column < PHASE_COUNT; column++) {
        if (seconds[column] <= 0)
            continue;
        PyObject *value = PyFloat_FromDouble(seconds[column]);
        if (value == NULL || PyDict_SetItem(by_name, PyTuple_GET_ITEM(phase_names, column), value) < 0)
            Py_CLEAR(by_name);
        Py_XDECREF(value);
    }
    return by_name == NULL ? NULL : Py_BuildValue("(Nd)", by_name, nested);
}

static PyObject *phases_adopt_thread(Phases *self, PyObject *Py_UNUSED(unused))
{
    if (self->depth == 0)
        self->owner = PyThread_get_thread_ident();
    Py_RETURN_NONE;
}

PyDoc_STRVAR(own_doc, "take_own()\n\nReturn (seconds spent in `step` since the last call, number of those steps).");

static PyObject *phases_take_own(Phases *self, PyObject *Py_UNUSED(unused))
{
    double seconds = self->own;
    long long count = self->own_count;
    self->own = 0;
    self->own_count = 0;
    return Py_BuildValue("(dL)", seconds, count);
}

static PyObject *phases_get_open(Phases *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(self->depth);
}

static PyObject *phases_get_failed(Phases *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->failed == NULL ? Py_None : self->failed);
}

static int phases_set_failed(Phases *self, PyObject *value, void *Py_UNUSED(closure))
{
    PyObject *kept = value == NULL || value == Py_None ? NULL : Py_NewRef(value);
    Py_XSETREF(self->failed, kept);
    return 0;
}

/* Types. */

static int phases_traverse(Phases *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(self));
    Py_VISIT(self->map.obj);
    Py_VISIT(self->monotonic);
    Py_VISIT(self->remember);
    Py_VISIT(self->memory);
    Py_VISIT(self->failed);
    for (int depth = 0; depth < self->depth; depth++)
        Py_VISIT(self->open[depth].phase);
    return 0;
}

static int phases_clear(Phases *self)
{
    int entered = self->depth;
    self->depth = 0;
    self->live = 0;
    for (int depth = 0; depth < entered; depth++)
        Py_CLEAR(self->open[depth].phase);
    Py_CLEAR(self->monotonic);
    Py_CLEAR(self->remember);
    Py_CLEAR(self->memory);
    Py_CLEAR(self->failed);
    Py_CLEAR(self->modules);
    Py_CLEAR(self->cuda);
    if (self->map.obj != NULL)
        PyBuffer_Release(&self->map);
    return 0;
}

static void phases_dealloc(Phases *self)
{
    PyTypeObject *type = Py_TYPE(self);
    PyObject_GC_UnTrack(self);
    phases_clear(self);
    type->tp_free((PyObject *)self);
    if (type->tp_flags & Py_TPFLAGS_HEAPTYPE)
        Py_DECREF(type);
}

PyDoc_STRVAR(phases_doc,
"HotPhases(map, monotonic, remember, memory, columns, notify_every_s)\n\n"
"map: the flight record's mmap, or None. monotonic: a clock, or None for CLOCK_MONOTONIC. remember: called with each\n"
"loss. memory: returns (allocated, reserved) bytes; called only if torch.cuda is imported. columns: for each of\n"
"layout.PHASES, its name and the flag of a step that spent time in it.");

static int phases_init(Phases *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"map", "monotonic", "remember", "memory", "columns", "notify_every_s", NULL};
    PyObject *map, *monotonic, *remember, *memory, *columns;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOO!d:HotPhases", names, &map, &monotonic, &remember, &memory,
                                     &PyTuple_Type, &columns, &self->notify_every))
        return -1;
    if (PyTuple_GET_SIZE(columns) != PHASE_COUNT) {
        PyErr_Format(PyExc_ValueError, "%zd phase columns, but this module was built for %d", PyTuple_GET_SIZE(columns), PHASE_COUNT);
        return -1;
    }
    PyObject *by_column = PyTuple_New(PHASE_COUNT);
    if (by_column == NULL)
        return -1;
    for (int column = 0; column < PHASE_COUNT; column++) {
        PyObject *name;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(columns, column), "UI", &name, &self->flags[column])) {
            Py_DECREF(by_column);
            return -1;
        }
        PyTuple_SET_ITEM(by_column, column, Py_NewRef(name));
        if (PyUnicode_CompareWithASCIIString(name, "monitor") == 0)
            self->monitor = column;
    }
    Py_XSETREF(phase_names, by_column);
    if (map != Py_None && PyObject_GetBuffer(map, &self->map, PyBUF_WRITABLE) < 0)
        return -1;
    if (self->map.obj != NULL && self->map.len != FILE_SIZE) {
        PyErr_Format(PyExc_ValueError, "the flight record has %zd bytes, but this module was built for %d", self->map.len, FILE_SIZE);
        return -1;
    }
    self->monotonic = monotonic == Py_None ? NULL : Py_NewRef(monotonic);
    self->remember = Py_NewRef(remember);
    self->memory = Py_NewRef(memory);
    self->modules = Py_NewRef(PyImport_GetModuleDict());
    self->cuda = PyUnicode_InternFromString("torch.cuda");
    self->owner = PyThread_get_thread_ident();
    self->live = 1;
    self->notified = self->kept_house = -INFINITY;
    self->socket = -1;
    self->started = now_of(self);
    return PyErr_Occurred() || self->cuda == NULL ? -1 : 0;
}

static PyMethodDef phases_methods[] = {
    {"step", (PyCFunction)(void *)phases_step, METH_FASTCALL, step_doc},
    {"reach", (PyCFunction)phases_reach, METH_VARARGS, reach_doc},
    {"watch", (PyCFunction)phases_watch, METH_O, watch_doc},
    {"take", (PyCFunction)phases_take, METH_O, take_doc},
    {"take_own", (PyCFunction)phases_take_own, METH_NOARGS, own_doc},
    {"adopt_thread", (PyCFunction)phases_adopt_thread, METH_NOARGS, "Make the calling thread the training thread."},
    {0},
};

static PyGetSetDef phases_properties[] = {
    {"open", (getter)phases_get_open, NULL, "The number of open phases.", NULL},
    {"failed", (getter)phases_get_failed, (setter)phases_set_failed,
     "The first error while entering or leaving a phase since the last step.", NULL},
    {0},
};

static PyMemberDef phases_members[] = {
    {"live", T_BOOL, offsetof(Phases, live), 0, "Whether phases are timed; false after close and in a forked child."},
    {"owner", T_ULONG, offsetof(Phases, owner), 0, "The training thread."},
    {"count", T_LONGLONG, offsetof(Phases, count), 0, "Number of steps this process has taken."},
    {"started", T_DOUBLE, offsetof(Phases, started), 0, "Monotonic time, in seconds, at which the current step began."},
    {0},
};

PyTypeObject hot_phases_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "miner_guard.flight_recorder._hot.HotPhases",
    .tp_basicsize = sizeof(Phases),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC,
    .tp_doc = phases_doc,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)phases_init,
    .tp_dealloc = (destructor)phases_dealloc,
    .tp_traverse = (traverseproc)phases_traverse,
    .tp_clear = (inquiry)phases_clear,
    .tp_methods = phases_methods,
    .tp_getset = phases_properties,
    .tp_members = phases_members,
};

static int phase_traverse(Phase *phase, visitproc visit, void *arg)
{
    Py_VISIT(phase->phases);
    return 0;
}

static int phase_clear(Phase *phase)
{
    /* Keep its phases until it is freed, because any holder may still enter it. */
    (void)phase;
    return 0;
}

static void phase_dealloc(Phase *phase)
{
    PyObject_GC_UnTrack(phase);
    Py_XDECREF(phase->phases);
    Py_TYPE(phase)->tp_free((PyObject *)phase);
}

static int phase_init(Phase *phase, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"phases", "name", "column", "allowance_s", "longest_s", NULL};
    PyObject *phases;
    const char *name;
    Py_ssize_t length;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!y#idd:HotPhase", names, &hot_phases_type, &phases, &name, &length,
                                     &phase->column, &phase->allowance, &phase->longest))
        return -1;
    if (phase->column < 0 || phase->column >= PHASE_COUNT || length > NAME_SIZE) {
        PyErr_SetString(PyExc_ValueError, "the column does not exist, or the name exceeds 24 bytes");
        return -1;
    }
    memcpy(phase->name, name, (size_t)length);
    Py_XSETREF(phase->phases, (Phases *)Py_NewRef(phases));
    return 0;
}

static PyMethodDef phase_methods[] = {
    {"__enter__", (PyCFunction)phase_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void *)phase_exit, METH_FASTCALL, NULL},
    {0},
};

PyTypeObject hot_phase_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "miner_guard.flight_recorder._hot.HotPhase",
    .tp_basicsize = sizeof(Phase),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "HotPhase(phases, name, column, allowance_s, longest_s)",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)phase_init,
    .tp_dealloc = (destructor)phase_dealloc,
    .tp_traverse = (traverseproc)phase_traverse,
    .tp_clear = (inquiry)phase_clear,
    .tp_methods = phase_methods,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_hot",
    .m_doc = "The compiled hot path of the hook. LAYOUT: the layout that it was built for.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__hot(void)
{
    if (PyType_Ready(&hot_phases_type) < 0 || PyType_Ready(&hot_phase_type) < 0 || PyType_Ready(&hot_loop_type) < 0
        || PyType_Ready(&hot_backward_type) < 0)
        return NULL;
    PyObject *made = PyModule_Create(&module);
    PyObject *layout = Py_BuildValue(
        "{s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i,s:i}", "header_offset", HEADER_OFFSET, "header_size", (int)sizeof(Header),
        "ring_offset", RING_OFFSET, "ring_slots", RING_SLOTS, "step_size", STEP_SIZE, "step_bytes", (int)STEP_BYTES,
        "file_size", FILE_SIZE, "phases", PHASE_COUNT, "interface", INTERFACE);
    if (made == NULL || layout == NULL || PyModule_AddObjectRef(made, "LAYOUT", layout) < 0
        || PyModule_AddObjectRef(made, "HotPhases", (PyObject *)&hot_phases_type) < 0
        || PyModule_AddObjectRef(made, "HotPhase", (PyObject *)&hot_phase_type) < 0
        || PyModule_AddObjectRef(made, "HotLoop", (PyObject *)&hot_loop_type) < 0) {
        Py_XDECREF(made);
        made = NULL;
    }
    Py_XDECREF(layout);
    return made;
}
