/* Computes the template of each line (line_templates.py): lower case, without digits, signs and
   points. A miner prints the same few templates over and over, so equal templates share one object,
   and a line that differs from an earlier one only in its numbers is not converted at all. Keeps no
   state between calls. Releases the interpreter lock while it processes a large text, so that the
   guard can write out earlier output in the meantime. Code that runs without the lock must not
   touch a reference count. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#define MAX_PROBES 32 /* After this many probes, give the template its own object. */
#define LENGTHS 512
#define SLOTS 1024 /* Initial size of the table. */
#define LARGE 65536
#define MAX_HANDOFFS 16 /* After releasing the lock this many times, keep it. */

typedef struct {
    uint64_t hash;
    PyObject *template; /* Borrowed from `made`. */
} known;

typedef struct {
    const uint8_t *at;
    size_t size;
    PyObject *template; /* Borrowed from `made`. */
} line;

typedef struct {
    known *table;
    size_t mask;
    size_t used;
    line latest[LENGTHS]; /* The latest line of each length. */
    uint8_t *scratch;
    PyObject **found; /* The template of each line, borrowed from `made`. */
    size_t count, room;
    PyObject *made, *distinct;
    PyThreadState *outside; /* NULL while this thread holds the interpreter lock. */
    int handoffs;
} search;

static uint8_t lower[256], kept[256];

static uint64_t hash_of(const uint8_t *at, size_t size)
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

/* Return 1 if two lines of the same size differ only in characters that a template drops. */
static int alike(const uint8_t *a, const uint8_t *b, size_t size)
{
    size_t i = 0;
    while (i < size) {
        uint64_t words[2];
        if (size - i >= sizeof *words) {
            memcpy(&words[0], a + i, sizeof *words);
            memcpy(&words[1], b + i, sizeof *words);
            if (words[0] == words[1]) {
                i += sizeof *words;
                continue;
            }
        }
        for (size_t stop = size - i < sizeof *words ? size : i + sizeof *words; i < stop; i++) {
            if (a[i] != b[i] && (kept[a[i]] | kept[b[i]])) {
                return 0;
            }
        }
    }
    return 1;
}

static void leave(search *self)
{
    if (self->outside == NULL && self->handoffs++ < MAX_HANDOFFS) {
        self->outside = PyEval_SaveThread();
    }
}

static void enter(search *self)
{
    if (self->outside != NULL) {
        PyEval_RestoreThread(self->outside);
        self->outside = NULL;
    }
}

/* Enlarge the table. It starts small to keep texts with few templates cheap. */
static int widen(search *self)
{
    const size_t slots = self->table == NULL ? SLOTS : 4 * (self->mask + 1);
    known *table = PyMem_Calloc(slots, sizeof *table);
    if (table == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (size_t i = 0; self->table != NULL && i <= self->mask; i++) {
        size_t slot = self->table[i].hash;
        if (self->table[i].template == NULL) {
            continue;
        }
        while (table[slot & (slots - 1)].template != NULL) {
            slot++;
        }
        table[slot & (slots - 1)] = self->table[i];
    }
    PyMem_Free(self->table);
    self->table = table;
    self->mask = slots - 1;
    return 0;
}

/* Create a template. The caller must hold the interpreter lock. */
static PyObject *make(search *self, const uint8_t *at, size_t size)
{
    PyObject *made = PyBytes_FromStringAndSize((const char *)at, (Py_ssize_t)size);
    if (made == NULL) {
        return NULL;
    }
    const int failed = PyList_Append(self->made, made) < 0 || PySet_Add(self->distinct, made) < 0;
    Py_DECREF(made);
    return failed ? NULL : made;
}

/* Return the template of these bytes from the table, or create it. */
static PyObject *interned(search *self, const uint8_t *at, size_t size)
{
    const uint64_t hash = hash_of(at, size);
    known *free_slot = NULL;
    for (size_t probe = 0; probe < MAX_PROBES; probe++) {
        known *one = &self->table[(hash + probe) & self->mask];
        if (one->template == NULL) {
            free_slot = one;
            break;
        }
        if (one->hash == hash && (size_t)PyBytes_GET_SIZE(one->template) == size &&
            memcmp(PyBytes_AS_STRING(one->template), at, size) == 0) {
            return one->template;
        }
    }
    const int outside = self->outside != NULL;
    enter(self);
    PyObject *made = make(self, at, size);
    if (made != NULL && free_slot != NULL) {
        *free_slot = (known){hash, made};
        self->used++;
    }
    if (made == NULL || (2 * self->used > self->mask && widen(self) < 0)) {
        return NULL;
    }
    if (outside) {
        leave(self);
    }
    return made;
}

static PyObject *template_of(search *self, const uint8_t *at, size_t size)
{
    line *latest = &self->latest[size % LENGTHS];
    if (latest->template != NULL && latest->size == size && alike(latest->at, at, size)) {
        return latest->template;
    }
    uint8_t *end = self->scratch;
    for (size_t i = 0; i < size; i++) {
        *end = lower[at[i]];
        end += kept[at[i]];
    }
    PyObject *found = interned(self, self->scratch, (size_t)(end - self->scratch));
    *latest = (line){at, size, found};
    return found;
}

static const uint8_t *end_of_line(const uint8_t *at, const uint8_t *end)
{
    const uint8_t *found = at < end ? memchr(at, '\n', (size_t)(end - at)) : NULL;
    return found == NULL ? end : found;
}

/* Return 1 if the text at `at` begins with a line of the same size and template as `latest`. */
static int repeats(const line *latest, const uint8_t *at, const uint8_t *end)
{
    return latest->template != NULL && (size_t)(end - at) > latest->size &&
           at[latest->size] == '\n' && alike(latest->at, at, latest->size);
}

static int append(search *self, PyObject *template)
{
    if (self->count == self->room) {
        const size_t room = self->room ? 2 * self->room : 1024;
        PyObject **found = PyMem_RawRealloc(self->found, room * sizeof *found);
        if (found == NULL) {
            enter(self);
            PyErr_NoMemory();
            return -1;
        }
        self->found = found;
        self->room = room;
    }
    self->found[self->count++] = template;
    return 0;
}

/* Return 0, or -1 with an exception set and the interpreter lock held. */
static int find(search *self, const uint8_t *at, const uint8_t *end)
{
    const line *latest = &self->latest[0];
    while (1) {
        if (repeats(latest, at, end)) {
            if (append(self, latest->template) < 0) {
                return -1;
            }
            at += latest->size + 1;
            continue;
        }
        const uint8_t *stop = end_of_line(at, end);
        const size_t size = (size_t)(stop - at);
        PyObject *template = template_of(self, at, size);
        if (template == NULL || append(self, template) < 0) {
            return -1;
        }
        if (stop == end) {
            return 0;
        }
        latest = &self->latest[size % LENGTHS];
        at = stop + 1;
    }
}

static PyObject *listed(const search *self)
{
    PyObject *list = PyList_New((Py_ssize_t)self->count);
    for (size_t i = 0; list != NULL && i < self->count; i++) {
        PyList_SET_ITEM(list, (Py_ssize_t)i, Py_NewRef(self->found[i]));
    }
    return list;
}

static PyObject *searched(search *self, const uint8_t *at, size_t size)
{
    self->scratch = PyMem_Malloc(size + 1);
    self->made = PyList_New(0);
    self->distinct = PyFrozenSet_New(NULL);
    if (self->scratch == NULL) {
        return PyErr_NoMemory();
    }
    if (self->made == NULL || self->distinct == NULL || widen(self) < 0) {
        return NULL;
    }
    if (size >= LARGE) {
        leave(self);
    }
    const int failed = find(self, at, at + size);
    enter(self);
    PyObject *list = failed ? NULL : listed(self);
    return list == NULL ? NULL : Py_BuildValue("NO", list, self->distinct);
}

static PyObject *templates(PyObject *Py_UNUSED(module), PyObject *text)
{
    if (!PyBytes_Check(text)) {
        PyErr_Format(PyExc_TypeError, "expected bytes, not %s", Py_TYPE(text)->tp_name);
        return NULL;
    }
    search *self = PyMem_Calloc(1, sizeof *self);
    if (self == NULL) {
        return PyErr_NoMemory();
    }
    const uint8_t *at = (const uint8_t *)PyBytes_AS_STRING(text);
    PyObject *both = searched(self, at, (size_t)PyBytes_GET_SIZE(text));
    Py_XDECREF(self->made);
    Py_XDECREF(self->distinct);
    PyMem_Free(self->table);
    PyMem_Free(self->scratch);
    PyMem_RawFree(self->found);
    PyMem_Free(self);
    return both;
}

static PyMethodDef functions[] = {
    {"templates", templates, METH_O, "Return the template of each line, and the distinct ones."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_templates", NULL, 0, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__templates(void)
{
    for (int c = 0; c < 256; c++) {
        lower[c] = (uint8_t)(c >= 'A' && c <= 'Z' ? c - 'A' + 'a' : c);
        kept[c] = c == 0 || strchr("0123456789+-.", c) == NULL;
    }
    return PyModuleDef_Init(&definition);
}
