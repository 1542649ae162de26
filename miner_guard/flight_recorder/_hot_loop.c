/* Records the usual step of a training loop that does not call the hook: one `backward` on a CPU scalar, one optimizer.
 *
 * With 50 ms between steps, the hook's code has left the processor's caches, and a function call costs more than the
 * function's work. So the usual step runs only this code: `backward` reads the loss from memory, the optimizer's hooks
 * enter and leave its phase, and its post-step hook records the step. Anything else (a second optimizer, a loss on a
 * GPU, a framework, a closed guard) goes to Python functions in attach/auto.py. They first take the state back with
 * `disarm`, and call `arm` again after a usual step.
 */
#include "_hot.h"

typedef struct {
    PyObject_HEAD
    PyObject *plain;          /* torch's own Tensor.backward */
    PyObject *slow_backward, *slow_stepping, *slow_stepped, *slow_step, *notify;
    PyObject *tensor, *float32, *float64;
    PyObject *leader;         /* weak reference to the optimizer whose steps count */
    Phases *phases;
    Phase *backward, *optimizer;
    char armed, may_sum, stepping;
    double total;
    long long count, steps;
} Loop;

/* The replacement for Tensor.backward: a method descriptor, with a __dict__ for functools.update_wrapper. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    Loop *loop;
    PyObject *dict;
} Backward;

static PyObject *name_dtype, *name_is_cpu, *name_dim, *name_data_ptr, *name_groups, *name_lr;

static int is_usual(Loop *self)
{
    return self->armed && hot_is_mine(self->phases);
}

/* Call a method without arguments; return its result as a number, or -1 on an error, which is cleared. */
static long long called(PyObject *object, PyObject *method)
{
    PyObject *answer = PyObject_CallMethodNoArgs(object, method);
    long long number = answer == NULL ? -1 : PyLong_AsLongLong(answer);
    Py_XDECREF(answer);
    PyErr_Clear();
    return number;
}

/* Add the tensor's value to the step's loss. Returns 0 if it is not a plain CPU scalar; sets no exception. `item()`
 * returns the same number through torch's dispatcher, which takes ten times as long with cold caches. */
static int note(Loop *self, PyObject *tensor)
{
    if ((PyObject *)Py_TYPE(tensor) != self->tensor)
        return 0;
    PyObject *on_cpu = PyObject_GetAttr(tensor, name_is_cpu);
    PyObject *dtype = PyObject_GetAttr(tensor, name_dtype);
    Py_XDECREF(on_cpu);
    Py_XDECREF(dtype);
    PyErr_Clear();
    if (on_cpu != Py_True || (dtype != self->float32 && dtype != self->float64) || called(tensor, name_dim) != 0)
        return 0;
    const void *data = (const void *)(intptr_t)called(tensor, name_data_ptr);
    if (data == NULL || data == (const void *)-1)
        return 0;
    self->total += dtype == self->float32 ? (double)*(const float *)data : *(const double *)data;
    self->count++;
    return 1;
}

static PyObject *backward_call(Backward *self, PyObject *const *args, size_t flags, PyObject *names)
{
    Loop *loop = self->loop;
    if (!is_usual(loop) || loop->stepping || PyVectorcall_NARGS(flags) < 1 || !note(loop, args[0]))
        return PyObject_Vectorcall(loop->slow_backward, args, flags, names);
    Phase *phase = (Phase *)Py_NewRef((PyObject *)loop->backward);
    hot_enter(phase);
    PyObject *result = PyObject_Vectorcall(loop->plain, args, flags, names);
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    hot_leave(phase);
    PyErr_Restore(type, value, trace);
    Py_DECREF(phase);
    return result;
}

static int is_leader(Loop *self, PyObject *optimizer)
{
    /* An object has only one weak reference without a callback, so the two can be compared by identity. */
    PyObject *reference = PyWeakref_NewRef(optimizer, NULL);
    Py_XDECREF(reference);
    PyErr_Clear();
    return reference == self->leader;
}

PyDoc_STRVAR(stepping_doc, "stepping(optimizer, args, kwargs)\n\nThe optimizers' pre-step hook.");

static PyObject *loop_stepping(Loop *self, PyObject *const *args, Py_ssize_t count)
{
    if (count < 1 || !is_usual(self) || self->stepping || !is_leader(self, args[0]))
        return PyObject_Vectorcall(self->slow_stepping, args, (size_t)count, NULL);
    self->stepping = 1;
    hot_enter(self->optimizer);
    Py_RETURN_NONE;
}

/* Record the optimizer's step. Returns 0 if it is not a usual step, otherwise the result of hot_step. */
static int record(Loop *self, PyObject *optimizer)
{
    if (!self->count || (self->count > 1 && !self->may_sum))
        return 0;
    PyObject *groups = PyObject_GetAttr(optimizer, name_groups);
    PyObject *first = groups != NULL && PyList_CheckExact(groups) && PyList_GET_SIZE(groups)
        ? PyList_GET_ITEM(groups, 0) : NULL;
    PyObject *lr = first != NULL && PyDict_CheckExact(first) ? PyDict_GetItemWithError(first, name_lr) : NULL;
    PyObject *loss = lr == NULL ? NULL : PyFloat_FromDouble(self->total);
    PyObject *number = loss == NULL ? NULL : PyLong_FromLongLong(self->steps + 1);
    int done = 0;
    if (number != NULL) {
        Given given = {Py_None, number, Py_None, loss, lr, Py_None, Py_None, Py_None};
        done = hot_step(self->phases, &given);
    }
    Py_XDECREF(number);
    Py_XDECREF(loss);
    Py_XDECREF(groups);
    PyErr_Clear();
    return done;
}

PyDoc_STRVAR(stepped_doc, "stepped(optimizer, args, kwargs)\n\nThe optimizers' post-step hook.");

static PyObject *loop_stepped(Loop *self, PyObject *const *args, Py_ssize_t count)
{
    if (count < 1 || !is_usual(self) || !self->stepping || !is_leader(self, args[0]))
        return PyObject_Vectorcall(self->slow_stepped, args, (size_t)count, NULL);
    self->stepping = 0;
    hot_leave(self->optimizer);
    int done = record(self, args[0]);
    if (!done)
        return PyObject_CallOneArg(self->slow_step, args[0]);
    self->steps++;
    self->total = 0;
    self->count = 0;
    return done > 1 ? PyObject_CallNoArgs(self->notify) : Py_NewRef(Py_None);
}

PyDoc_STRVAR(arm_doc,
"arm(phases, backward, optimizer, leader, steps, may_sum)\n\n"
"Record usual steps from now on. phases: the HotPhases; backward, optimizer: HotPhase; leader: a weak reference to the\n"
"optimizer whose steps count; steps: how many it has taken; may_sum: the sum of several micro-batches' losses is the\n"
"step's loss.");

static PyObject *loop_arm(Loop *self, PyObject *args)
{
    PyObject *phases, *backward, *optimizer, *leader;
    long long steps;
    int may_sum;
    if (!PyArg_ParseTuple(args, "O!O!O!OLp:arm", &hot_phases_type, &phases, &hot_phase_type, &backward,
                          &hot_phase_type, &optimizer, &leader, &steps, &may_sum))
        return NULL;
    Py_XSETREF(self->phases, (Phases *)Py_NewRef(phases));
    Py_XSETREF(self->backward, (Phase *)Py_NewRef(backward));
    Py_XSETREF(self->optimizer, (Phase *)Py_NewRef(optimizer));
    Py_XSETREF(self->leader, Py_NewRef(leader));
    self->steps = steps;
    self->may_sum = (char)may_sum;
    self->stepping = 0;
    self->total = 0;
    self->count = 0;
    self->armed = 1;
    Py_RETURN_NONE;
}

PyDoc_STRVAR(disarm_doc,
"disarm()\n\nLet Python handle the rest of this step. Returns (loss up to now, its micro-batches, steps, stepping).");

static PyObject *loop_disarm(Loop *self, PyObject *Py_UNUSED(unused))
{
    self->armed = 0;
    return Py_BuildValue("(dLLO)", self->total, self->count, self->steps, self->stepping ? Py_True : Py_False);
}

static PyObject *loop_get_backward(Loop *self, void *Py_UNUSED(closure))
{
    Backward *made = PyObject_GC_New(Backward, &hot_backward_type);
    if (made == NULL)
        return NULL;
    made->call = (vectorcallfunc)backward_call;
    made->loop = (Loop *)Py_NewRef((PyObject *)self);
    made->dict = NULL;
    PyObject_GC_Track(made);
    return (PyObject *)made;
}

/* Types. */

static int loop_init(Loop *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"torch", "backward", "slow_backward", "slow_stepping", "slow_stepped", "slow_step", "notify",
                            NULL};
    PyObject *torch, *plain, *backward, *stepping, *stepped, *step, *notify;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOOO:HotLoop", names, &torch, &plain, &backward, &stepping,
                                     &stepped, &step, &notify))
        return -1;
    Py_XSETREF(self->tensor, PyObject_GetAttrString(torch, "Tensor"));
    Py_XSETREF(self->float32, PyObject_GetAttrString(torch, "float32"));
    Py_XSETREF(self->float64, PyObject_GetAttrString(torch, "float64"));
    Py_XSETREF(self->plain, Py_NewRef(plain));
    Py_XSETREF(self->slow_backward, Py_NewRef(backward));
    Py_XSETREF(self->slow_stepping, Py_NewRef(stepping));
    Py_XSETREF(self->slow_stepped, Py_NewRef(stepped));
    Py_XSETREF(self->slow_step, Py_NewRef(step));
    Py_XSETREF(self->notify, Py_NewRef(notify));
    name_dtype = PyUnicode_InternFromString("dtype");
    name_is_cpu = PyUnicode_InternFromString("is_cpu");
    name_dim = PyUnicode_InternFromString("dim");
    name_data_ptr = PyUnicode_InternFromString("data_ptr");
    name_groups = PyUnicode_InternFromString("param_groups");
    name_lr = PyUnicode_InternFromString("lr");
    return PyErr_Occurred() ? -1 : 0;
}

static int loop_traverse(Loop *self, visitproc visit, void *arg)
{
    Py_VISIT(self->plain);
    Py_VISIT(self->slow_backward);
    Py_VISIT(self->slow_stepping);
    Py_VISIT(self->slow_stepped);
    Py_VISIT(self->slow_step);
    Py_VISIT(self->notify);
    Py_VISIT(self->tensor);
    Py_VISIT(self->leader);
    Py_VISIT(self->phases);
    Py_VISIT(self->backward);
    Py_VISIT(self->optimizer);
    return 0;
}

static int loop_clear(Loop *self)
{
    self->armed = 0;
    Py_CLEAR(self->plain);
    Py_CLEAR(self->slow_backward);
    Py_CLEAR(self->slow_stepping);
    Py_CLEAR(self->slow_stepped);
    Py_CLEAR(self->slow_step);
    Py_CLEAR(self->notify);
    Py_CLEAR(self->tensor);
    Py_CLEAR(self->float32);
    Py_CLEAR(self->float64);
    Py_CLEAR(self->leader);
    Py_CLEAR(self->phases);
    Py_CLEAR(self->backward);
    Py_CLEAR(self->optimizer);
    return 0;
}

static void loop_dealloc(Loop *self)
{
    PyObject_GC_UnTrack(self);
    loop_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int backward_traverse(Backward *self, visitproc visit, void *arg)
{
    Py_VISIT(self->loop);
    Py_VISIT(self->dict);
    return 0;
}

static void backward_dealloc(Backward *self)
{
    PyObject_GC_UnTrack(self);
    Py_CLEAR(self->loop);
    Py_CLEAR(self->dict);
    PyObject_GC_Del(self);
}

static PyObject *backward_bind(PyObject *self, PyObject *tensor, PyObject *Py_UNUSED(type))
{
    return tensor == NULL || tensor == Py_None ? Py_NewRef(self) : PyMethod_New(self, tensor);
}

static PyMethodDef loop_methods[] = {
    {"stepping", (PyCFunction)(void *)loop_stepping, METH_FASTCALL, stepping_doc},
    {"stepped", (PyCFunction)(void *)loop_stepped, METH_FASTCALL, stepped_doc},
    {"arm", (PyCFunction)loop_arm, METH_VARARGS, arm_doc},
    {"disarm", (PyCFunction)loop_disarm, METH_NOARGS, disarm_doc},
    {0},
};

static PyGetSetDef loop_properties[] = {
    {"backward", (getter)loop_get_backward, NULL, "A new replacement for Tensor.backward.", NULL},
    {0},
};

static PyMemberDef loop_members[] = {
    {"armed", T_BOOL, offsetof(Loop, armed), READONLY, "Whether usual steps are recorded here."},
    {0},
};

PyTypeObject hot_loop_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "miner_guard.flight_recorder._hot.HotLoop",
    .tp_basicsize = sizeof(Loop),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "HotLoop(torch, backward, slow_backward, slow_stepping, slow_stepped, slow_step, notify)",
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)loop_init,
    .tp_dealloc = (destructor)loop_dealloc,
    .tp_traverse = (traverseproc)loop_traverse,
    .tp_clear = (inquiry)loop_clear,
    .tp_methods = loop_methods,
    .tp_getset = loop_properties,
    .tp_members = loop_members,
};

static PyGetSetDef backward_properties[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {0},
};

PyTypeObject hot_backward_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "miner_guard.flight_recorder._hot.HotBackward",
    .tp_basicsize = sizeof(Backward),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR,
    .tp_dealloc = (destructor)backward_dealloc,
    .tp_traverse = (traverseproc)backward_traverse,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Backward, call),
    .tp_descr_get = backward_bind,
    .tp_dictoffset = offsetof(Backward, dict),
    .tp_getset = backward_properties,
};
