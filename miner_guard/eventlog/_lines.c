/* Splits text into lines, of which equal ones are the same object: a miner prints the same few
   templates over and over, and most of the time of a split goes into objects. Holds no state. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#define MAX_PROBES 32 /* Beyond it a line gets an object of its own: no text takes longer. */

typedef struct {
    uint64_t hash;
    PyObject *line; /* Borrowed from the list. */
} slot;

static uint64_t hash_of(const char *at, size_t size)
{
    uint64_t hash = size * 0x9E3779B97F4A7C15u, word;
    while (size >= 8) {
        memcpy(&word, at, 8);
        hash = (hash ^ word) * 0xFF51AFD7ED558CCDu;
        hash ^= hash >> 32;
        at += 8;
        size -= 8;
    }
    word = 0;
    memcpy(&word, at, size);
    hash = (hash ^ word) * 0xC4CEB9FE1A85EC53u;
    return hash ^ (hash >> 29);
}

/* Return a new reference to the line, from the table if it holds an equal one; else add it there
   and to `distinct`. */
static PyObject *line_of(slot *table, size_t mask, PyObject *distinct, const char *at, size_t size)
{
    const uint64_t hash = hash_of(at, size);
    slot *free_slot = NULL;
    for (size_t probe = 0; probe < MAX_PROBES; probe++) {
        slot *one = &table[(hash + probe) & mask];
        if (one->line == NULL) {
            free_slot = one;
            break;
        }
        if (one->hash == hash && (size_t)PyBytes_GET_SIZE(one->line) == size &&
            memcmp(PyBytes_AS_STRING(one->line), at, size) == 0) {
            return Py_NewRef(one->line);
        }
    }
    PyObject *line = PyBytes_FromStringAndSize(at, (Py_ssize_t)size);
    if (line == NULL || PySet_Add(distinct, line) < 0) {
        Py_XDECREF(line);
        return NULL;
    }
    if (free_slot != NULL) {
        free_slot->hash = hash;
        free_slot->line = line;
    }
    return line;
}

static size_t newlines(const char *at, const char *end)
{
    size_t count = 0;
    while (at < end && (at = memchr(at, '\n', (size_t)(end - at))) != NULL) {
        at++;
        count++;
    }
    return count;
}

static int fill(PyObject *lines, PyObject *distinct, const char *at, const char *end)
{
    const size_t count = (size_t)PyList_GET_SIZE(lines);
    size_t slots = 64;
    while (slots < 2 * count) {
        slots *= 2;
    }
    slot *table = PyMem_Calloc(slots, sizeof *table);
    if (table == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    size_t index = 0;
    for (; index < count; index++) {
        const char *stop = at < end ? memchr(at, '\n', (size_t)(end - at)) : NULL;
        stop = stop == NULL ? end : stop;
        PyObject *line = line_of(table, slots - 1, distinct, at, (size_t)(stop - at));
        if (line == NULL) {
            break;
        }
        PyList_SET_ITEM(lines, (Py_ssize_t)index, line);
        at = stop + 1;
    }
    PyMem_Free(table);
    return index == count ? 0 : -1;
}

static PyObject *split(PyObject *Py_UNUSED(module), PyObject *text)
{
    if (!PyBytes_Check(text)) {
        PyErr_Format(PyExc_TypeError, "bytes expected, not %s", Py_TYPE(text)->tp_name);
        return NULL;
    }
    const char *at = PyBytes_AS_STRING(text), *end = at + PyBytes_GET_SIZE(text);
    PyObject *lines = PyList_New((Py_ssize_t)newlines(at, end) + 1);
    PyObject *distinct = PyFrozenSet_New(NULL);
    if (lines == NULL || distinct == NULL || fill(lines, distinct, at, end) < 0) {
        Py_XDECREF(lines);
        Py_XDECREF(distinct);
        return NULL;
    }
    return Py_BuildValue("NN", lines, distinct);
}

static PyMethodDef functions[] = {
    {"split", split, METH_O, "The lines of a text, and the distinct ones among them."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_lines", NULL, 0, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__lines(void)
{
    return PyModuleDef_Init(&definition);
}
