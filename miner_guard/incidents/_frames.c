/* Finds the runs of stack frames in a block of lines (frame_runs.py), which make up most lines of a
   log full of errors. Keeps no state. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#define MAX_PATH_LENGTH 1000
#define MAX_TEXT 8192
#define MAX_RANK_DIGITS 5

#define HEADER "Traceback (most recent call last):"
#define FRAME "  File \""
#define AFTER_PATH "\", line "
#define AFTER_NUMBER ", in "
#define SOURCE "    "
#define RAISE "    raise "

typedef struct {
    const uint8_t *at;
    const uint8_t *end;
} span;

static size_t size_of(span text)
{
    return (size_t)(text.end - text.at);
}

/* Return whether `text` begins with a literal, and if so, move past it. */
static int skip(span *text, const char *literal)
{
    const size_t size = strlen(literal);
    if (size_of(*text) < size || memcmp(text->at, literal, size) != 0) {
        return 0;
    }
    text->at += size;
    return 1;
}

static size_t skip_digits(span *text, size_t most)
{
    size_t count = 0;
    while (count < most && text->at < text->end && *text->at >= '0' && *text->at <= '9') {
        text->at++;
        count++;
    }
    return count;
}

/* The line that begins at `at`, without its newline. If it has no newline, `at` is NULL. */
static span line_at(const uint8_t *at, const uint8_t *end)
{
    const uint8_t *stop = at < end ? memchr(at, '\n', (size_t)(end - at)) : NULL;
    return (span){stop == NULL ? NULL : at, stop};
}

/* The prefix that torch or torchrun --tee adds; may be empty. */
static span prefix_of(span line)
{
    span rest = line;
    if (skip(&rest, "[rank") && skip_digits(&rest, MAX_RANK_DIGITS) && skip(&rest, "]: ")) {
        return (span){line.at, rest.at};
    }
    rest = line;
    if (skip(&rest, "[default") && skip_digits(&rest, MAX_RANK_DIGITS) && skip(&rest, "]:")) {
        return (span){line.at, rest.at};
    }
    return (span){line.at, line.at};
}

static int skip_prefix(span *line, span prefix)
{
    const size_t size = size_of(prefix);
    if (line->at == NULL || size_of(*line) < size || memcmp(line->at, prefix.at, size) != 0) {
        return 0;
    }
    line->at += size;
    return 1;
}

/* The path in a frame line. If the line is not a frame, `at` is NULL. */
static span path_in(span line)
{
    const span none = {NULL, NULL};
    if (!skip(&line, FRAME)) {
        return none;
    }
    const uint8_t *quote = memchr(line.at, '"', size_of(line));
    if (quote == NULL || quote == line.at || quote - line.at > MAX_PATH_LENGTH) {
        return none;
    }
    const span path = {line.at, quote};
    line.at = quote;
    const int shown = skip(&line, AFTER_PATH) && skip_digits(&line, SIZE_MAX) &&
                      skip(&line, AFTER_NUMBER) && line.at < line.end;
    return shown ? path : none;
}

/* Python strips each quoted source line and indents it by four. Markers may follow below it. */
static int quotes_source(span line)
{
    if (!skip(&line, SOURCE)) {
        return 0;
    }
    if (line.at < line.end && memchr(" \t\r\f\v", *line.at, 5) == NULL) {
        return 1;
    }
    while (line.at < line.end && (*line.at == ' ' || *line.at == '~' || *line.at == '^')) {
        line.at++;
    }
    return line.at == line.end || (*line.at == '\r' && line.at + 1 == line.end);
}

static int is_header(span line)
{
    return skip(&line, HEADER) &&
           (line.at == line.end || (*line.at == '\r' && line.at + 1 == line.end));
}

typedef struct {
    const uint8_t *end; /* End of the block. */
    const uint8_t *at;  /* The next line; `number` counts it. */
    Py_ssize_t number;
    uint8_t *paths; /* Buffer that fits the paths of any run in the block. */
} search;

/* If a run begins on the next line, add it to the list and move past it. Return 0 if no run begins,
   -1 after an error. */
static int take_run(search *self, PyObject *runs)
{
    span line = line_at(self->at, self->end);
    const span prefix = prefix_of(line);
    const Py_ssize_t first = self->number;
    const uint8_t *text = self->at;
    Py_ssize_t number = first;
    skip_prefix(&line, prefix);
    const int starts = is_header(line);
    if (starts) {
        number++;
        line = line_at(line.end + 1, self->end);
        if (!skip_prefix(&line, prefix)) {
            return 0;
        }
    }
    span path = path_in(line), raises = {line.at, line.at};
    if (path.at == NULL) {
        return 0;
    }
    uint8_t *to = self->paths;
    const uint8_t *next;
    do {
        if (path.at != NULL) {
            if (to != self->paths) {
                *to++ = ' ';
            }
            memcpy(to, path.at, size_of(path));
            to += size_of(path);
        } else if (skip(&(span){line.at, line.end}, RAISE)) {
            raises = line;
        }
        number++;
        next = line.end + 1;
        line = line_at(next, self->end);
        if (!skip_prefix(&line, prefix)) {
            break;
        }
        path = path_in(line);
    } while (path.at != NULL || quotes_source(line));
    self->at = next;
    self->number = number;
    if (next - text > MAX_TEXT) {
        text = next - MAX_TEXT;
    }
    PyObject *run = Py_BuildValue(
        "nny#Oy#y#y#", first, number, (const char *)prefix.at, (Py_ssize_t)size_of(prefix),
        starts ? Py_True : Py_False, (const char *)self->paths, (Py_ssize_t)(to - self->paths),
        (const char *)raises.at, (Py_ssize_t)size_of(raises),
        (const char *)text, (Py_ssize_t)(next - text));
    const int failed = run == NULL || PyList_Append(runs, run) < 0;
    Py_XDECREF(run);
    return failed ? -1 : 1;
}

static int find(search *self, PyObject *runs)
{
    while (self->at < self->end) {
        const int found = memchr(" T[", *self->at, 3) != NULL ? take_run(self, runs) : 0;
        if (found < 0) {
            return -1;
        }
        if (!found) {
            const span line = line_at(self->at, self->end);
            if (line.at == NULL) {
                break;
            }
            self->at = line.end + 1;
            self->number++;
        }
    }
    return 0;
}

static PyObject *frame_runs(PyObject *Py_UNUSED(module), PyObject *block)
{
    if (!PyBytes_Check(block)) {
        PyErr_Format(PyExc_TypeError, "expected bytes, not %s", Py_TYPE(block)->tp_name);
        return NULL;
    }
    const uint8_t *at = (const uint8_t *)PyBytes_AS_STRING(block);
    const Py_ssize_t size = PyBytes_GET_SIZE(block);
    search self = {at + size, at, 0, PyMem_Malloc((size_t)size + 1)};
    PyObject *runs = PyList_New(0);
    if (self.paths == NULL) {
        PyErr_NoMemory();
    }
    if (self.paths == NULL || runs == NULL || find(&self, runs) < 0) {
        Py_CLEAR(runs);
    }
    PyMem_Free(self.paths);
    return runs;
}

static PyMethodDef functions[] = {
    {"frame_runs", frame_runs, METH_O, "The runs of stack frames in a block of lines."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_frames", NULL, 0, functions, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__frames(void)
{
    return PyModuleDef_Init(&definition);
}
