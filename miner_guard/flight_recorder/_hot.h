/* What _hot.c and _hot_loop.c share: the layout of the flight record, and the phases of a rank. */
#ifndef MINER_GUARD_HOT_H
#define MINER_GUARD_HOT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>

enum {
    HEADER_OFFSET = 192,
    RING_OFFSET = 4096,
    RING_SLOTS = 4096,
    STEP_SIZE = 256,
    FILE_SIZE = 1314816,
    PHASE_COUNT = 14,
    NAME_SIZE = 24,
    MAX_OPEN = 64,
    NOTIFICATION_SIZE = 64,
    INTERFACE = 2, /* must equal rank/hot.py's */
    STATE_RUNNING = 1,
};
enum {
    FLAG_FIRST = 1 << 1,
    FLAG_LOSS_GIVEN = 1 << 16,
    FLAG_GRAD_NORM_GIVEN = 1 << 17,
    FLAG_EVAL_LOSS_GIVEN = 1 << 18,
};

/* layout.NOW */
typedef struct {
    uint64_t lock;
    uint8_t state;
    uint8_t padding[7];
    char phase[NAME_SIZE];
    double since, heartbeat;
    int64_t outer_step, inner_step, total_steps;
    double loss, lr, allocated, allowance;
    uint64_t steps, entries, dropped, lost;
} Header;

/* layout.STEP */
typedef struct {
    uint64_t sequence;
    int64_t outer_step, inner_step, total_steps;
    double start, end, wall, loss, lr, grad_norm, eval_loss, allocated, reserved;
    int64_t tokens;
    uint32_t flags, check;
    float phases[PHASE_COUNT];
    float nested_in_monitor;
} StepRow;

enum { STEP_BYTES = offsetof(StepRow, nested_in_monitor) + sizeof(float) };
_Static_assert(sizeof(Header) == 144 && offsetof(Header, steps) == 112, "layout.NOW");
_Static_assert(STEP_BYTES == 180 && offsetof(StepRow, phases) == 120, "layout.STEP");

typedef struct Phase Phase;

typedef struct {
    Phase *phase;
    double since, counted_to, until, allowance;
} Open;

typedef struct {
    PyObject_HEAD
    Py_buffer map;            /* map.obj is NULL if there is no flight record */
    PyObject *monotonic;      /* a callable; NULL: use CLOCK_MONOTONIC */
    PyObject *remember, *memory; /* callables: take each loss; return CUDA memory in bytes */
    PyObject *failed;         /* the first error inside a phase since the last step, or NULL */
    PyObject *modules, *cuda; /* sys.modules, and torch.cuda's name in it */
    unsigned long owner;
    char live;
    int depth, monitor;
    Open open[MAX_OPEN];
    double seconds[PHASE_COUNT], nested;
    uint32_t flags[PHASE_COUNT];
    double started, notified, notify_every, kept_house, own;
    long long count, own_count;
    int socket;               /* for notifications to the supervisor; -1 if Python sends them */
    struct sockaddr_un supervisor;
    char notification[NOTIFICATION_SIZE];
    size_t notification_size;
    int signal;               /* watch whether the program replaces its handler; 0: watch no signal */
    PyOS_sighandler_t handler;
} Phases;

struct Phase {
    PyObject_HEAD
    Phases *phases;
    int column;
    double allowance, longest;
    char name[NAME_SIZE];
};

/* Return whether the calling thread's phases and steps are recorded. */
int hot_is_mine(Phases *phases);

/* Enter and leave a phase. Neither raises. */
void hot_enter(Phase *phase);
void hot_leave(Phase *phase);

/* The values that the training loop reports for a step; they may be of any type. */
typedef struct {
    PyObject *outer_step, *inner_step, *total_steps, *loss, *lr, *grad_norm, *eval_loss, *tokens;
} Given;

/* Record the step that ends now. Returns the same values as HotPhases.step. Sets no exception. */
int hot_step(Phases *phases, const Given *given);

extern PyTypeObject hot_phases_type, hot_phase_type, hot_loop_type, hot_backward_type;

#endif
