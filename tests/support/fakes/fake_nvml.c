/* libnvidia-ml.so.1 for machines without a GPU.
 *
 * Its state is the text file named by FAKE_NVML_STATE, read again at each call, so that a test changes what a
 * running process sees. A line is KEY=VALUE or KEY.GPU=VALUE; the latter wins for that GPU, the last line wins.
 *
 *   count=4                                   GPUs
 *   fail.SYMBOL=CODE, fail.SYMBOL.GPU=CODE    that function returns the nvmlReturn_t CODE
 *   fail.*.GPU=CODE                           every function of that GPU does
 *   fail.init=CODE, fail.handle.GPU=CODE      initialisation, the handle
 *   hang.SYMBOL=SECONDS, hang.SYMBOL.GPU=…    that function sleeps before it answers
 *   xid.GPU=NUMBER                            an event, delivered once per change of the number, to a process that registered before
 *
 * Further keys stand with each function. Structures follow nvml.h of driver 550.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int nvmlReturn_t;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef struct gpu {
    u32 index;
    int watched;
    u64 last_xid;
} *nvmlDevice_t;

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    INSUFFICIENT_SIZE = 7,
    TIMEOUT = 10,
    ARGUMENT_VERSION_MISMATCH = 25,
    GPUS = 16
};

static struct gpu gpus[GPUS];
static int initialized;

#define API __attribute__((visibility("default")))

/* The state file */

static int find(const char *key, char *value, size_t size)
{
    const char *path = getenv("FAKE_NVML_STATE");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512];
    size_t length = strlen(key);
    int found = 0;

    if (!file)
        return 0;
    while (fgets(line, sizeof line, file)) {
        if (strncmp(line, key, length) == 0 && line[length] == '=') {
            line[strcspn(line, "\r\n")] = '\0';
            snprintf(value, size, "%s", line + length + 1);
            found = 1;
        }
    }
    fclose(file);
    return found;
}

static int text_of(const char *key, nvmlDevice_t gpu, char *value, size_t size)
{
    char own[160];

    if (gpu) {
        snprintf(own, sizeof own, "%s.%u", key, gpu->index);
        if (find(own, value, size))
            return 1;
    }
    return find(key, value, size);
}

static u64 number_of(const char *key, nvmlDevice_t gpu, u64 otherwise)
{
    char value[64];

    return text_of(key, gpu, value, sizeof value) ? strtoull(value, NULL, 0) : otherwise;
}

/* What a function has to go through before it answers: the state file may make it hang or fail. */
static nvmlReturn_t pass(const char *symbol, nvmlDevice_t gpu)
{
    char key[160];
    u64 value;

    snprintf(key, sizeof key, "hang.%s", symbol);
    value = number_of(key, gpu, 0);
    if (value)
        sleep((u32)value);
    if (!initialized)
        return UNINITIALIZED;
    snprintf(key, sizeof key, "fail.%s", symbol);
    value = number_of(key, gpu, 0);
    if (value)
        return (nvmlReturn_t)value;
    return gpu ? (nvmlReturn_t)number_of("fail.*", gpu, 0) : SUCCESS;
}

#define PASS(gpu)                                    \
    do {                                             \
        nvmlReturn_t code_ = pass(__func__, (gpu));  \
        if (code_ != SUCCESS)                        \
            return code_;                            \
    } while (0)

static nvmlReturn_t copy_text(char *to, u32 size, const char *key, nvmlDevice_t gpu, const char *otherwise)
{
    char value[128];

    if (!text_of(key, gpu, value, sizeof value)) {
        if (gpu)
            snprintf(value, sizeof value, "%s%u", otherwise, gpu->index);
        else
            snprintf(value, sizeof value, "%s", otherwise);
    }
    if (strlen(value) >= size)
        return INSUFFICIENT_SIZE;
    memcpy(to, value, strlen(value) + 1);
    return SUCCESS;
}

/* Functions that answer one number: name, key in the state file, value without it. */
#define ANSWERS(type, name, key, otherwise)                  \
    API nvmlReturn_t name(nvmlDevice_t gpu, type *value)     \
    {                                                        \
        PASS(gpu);                                           \
        *value = (type)number_of(key, gpu, otherwise);       \
        return SUCCESS;                                      \
    }

#define ANSWERS_PAIR(name, key)                                             \
    API nvmlReturn_t name(nvmlDevice_t gpu, u32 *current, u32 *pending)     \
    {                                                                       \
        PASS(gpu);                                                          \
        *current = *pending = (u32)number_of(key, gpu, 0);                  \
        return SUCCESS;                                                     \
    }

/* The library and the system */

API nvmlReturn_t nvmlInitWithFlags(u32 flags)
{
    u64 value = number_of("hang.init", NULL, 0);

    (void)flags;
    if (value)
        sleep((u32)value);
    value = number_of("fail.init", NULL, 0);
    if (value)
        return (nvmlReturn_t)value;
    for (u32 i = 0; i < GPUS; i++)
        gpus[i].index = i;
    initialized++;
    return SUCCESS;
}

API nvmlReturn_t nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

API nvmlReturn_t nvmlShutdown(void)
{
    if (!initialized)
        return UNINITIALIZED;
    initialized--;
    return SUCCESS;
}

API const char *nvmlErrorString(nvmlReturn_t code)
{
    switch (code) {
    case 0: return "Success";
    case 3: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case 9: return "Driver Not Loaded";
    case 12: return "NVML Shared Library Not Found";
    case 15: return "GPU is lost";
    case 16: return "GPU requires reset";
    case 18: return "Driver/library version mismatch";
    default: return "Unknown Error";
    }
}

API nvmlReturn_t nvmlSystemGetDriverVersion(char *to, u32 size)
{
    PASS(NULL);
    return copy_text(to, size, "driver", NULL, "550.163.01");
}

API nvmlReturn_t nvmlSystemGetNVMLVersion(char *to, u32 size)
{
    PASS(NULL);
    return copy_text(to, size, "nvml", NULL, "12.550.163.01");
}

API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    PASS(NULL);
    *version = (int)number_of("cuda", NULL, 12040);
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetCount_v2(u32 *count)
{
    PASS(NULL);
    *count = (u32)number_of("count", NULL, 4);
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(u32 index, nvmlDevice_t *gpu)
{
    char key[64];
    u64 value;

    PASS(NULL);
    if (index >= GPUS || index >= number_of("count", NULL, 4))
        return INVALID_ARGUMENT;
    snprintf(key, sizeof key, "fail.handle.%u", index);
    value = number_of(key, NULL, 0);
    if (value)
        return (nvmlReturn_t)value;
    *gpu = &gpus[index];
    return SUCCESS;
}

/* Identity */

API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t gpu, char *to, u32 size)
{
    char value[96];

    PASS(gpu);
    if (!text_of("name", gpu, value, sizeof value))
        snprintf(value, sizeof value, "NVIDIA A100-SXM4-80GB");
    snprintf(to, size, "%s", value);
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t gpu, char *to, u32 size)
{
    PASS(gpu);
    return copy_text(to, size, "uuid", gpu, "GPU-00000000-0000-0000-0000-00000000000");
}

/* Memory: mem.total, mem.reserved, mem.used in bytes */

typedef struct {
    u64 total, free, used;
} nvmlMemory_t;

typedef struct {
    u32 version;
    u64 total, reserved, free, used;
} nvmlMemory_v2_t;

static void fill_memory(nvmlDevice_t gpu, nvmlMemory_v2_t *memory)
{
    memory->total = number_of("mem.total", gpu, 85899345920ULL);
    memory->reserved = number_of("mem.reserved", gpu, 600ULL << 20);
    memory->used = number_of("mem.used", gpu, 4ULL << 20);
    memory->free = memory->total - memory->used - memory->reserved;
}

API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t gpu, nvmlMemory_t *memory)
{
    nvmlMemory_v2_t all;

    PASS(gpu);
    fill_memory(gpu, &all);
    memory->total = all.total;
    memory->used = all.used + all.reserved; /* what makes the first version useless for an idle GPU */
    memory->free = all.free;
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t gpu, nvmlMemory_v2_t *memory)
{
    PASS(gpu);
    if (memory->version != ((u32)sizeof *memory | 2u << 24))
        return ARGUMENT_VERSION_MISMATCH;
    fill_memory(gpu, memory);
    return SUCCESS;
}

/* Load, heat, power, clocks */

typedef struct {
    u32 gpu, memory;
} nvmlUtilization_t;

API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t gpu, nvmlUtilization_t *rates)
{
    PASS(gpu);
    rates->gpu = (u32)number_of("util.gpu", gpu, 97);
    rates->memory = (u32)number_of("util.mem", gpu, 40);
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t gpu, u32 sensor, u32 *celsius)
{
    PASS(gpu);
    if (sensor != 0)
        return INVALID_ARGUMENT;
    *celsius = (u32)number_of("temp", gpu, 55);
    return SUCCESS;
}

typedef struct {
    u32 version, sensor;
    int celsius;
} nvmlTemperature_t;

API nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t gpu, nvmlTemperature_t *reading)
{
    PASS(gpu);
    if (reading->version != ((u32)sizeof *reading | 1u << 24))
        return ARGUMENT_VERSION_MISMATCH;
    reading->celsius = (int)number_of("temp", gpu, 55);
    return SUCCESS;
}

ANSWERS(u32, nvmlDeviceGetPowerUsage, "power.mw", 310000)
ANSWERS(u64, nvmlDeviceGetCurrentClocksEventReasons, "clocks.reasons", 0)
ANSWERS(u64, nvmlDeviceGetCurrentClocksThrottleReasons, "clocks.reasons", 0)

/* Modes */

ANSWERS_PAIR(nvmlDeviceGetMigMode, "mig")

/* Links */

ANSWERS(u32, nvmlDeviceGetCurrPcieLinkWidth, "pcie.width", 16)
ANSWERS(u32, nvmlDeviceGetMaxPcieLinkWidth, "pcie.width.max", 16)

typedef struct {
    unsigned char cluster[16];
    nvmlReturn_t status;
    u32 clique;
    unsigned char state;
} nvmlGpuFabricInfo_t;

/* fabric=1 not started, 2 in progress, 3 completed; without it this machine has no NVSwitch */
API nvmlReturn_t nvmlDeviceGetGpuFabricInfo(nvmlDevice_t gpu, nvmlGpuFabricInfo_t *info)
{
    char text[16];

    PASS(gpu);
    if (!text_of("fabric", gpu, text, sizeof text))
        return NOT_SUPPORTED;
    memset(info, 0, sizeof *info);
    info->state = (unsigned char)number_of("fabric", gpu, 3);
    return SUCCESS;
}

/* Errors of the memory: ecc.corr.vol, ecc.unc.vol, ecc.corr.agg, ecc.unc.agg; rows.corr, .unc, .pending, .failure */

API nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t gpu, u32 kind, u32 counter, u64 *count)
{
    static const char *const keys[2][2] = {{"ecc.corr.vol", "ecc.unc.vol"}, {"ecc.corr.agg", "ecc.unc.agg"}};

    PASS(gpu);
    if (kind > 1 || counter > 1)
        return INVALID_ARGUMENT;
    *count = number_of(keys[counter][kind], gpu, 0);
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t gpu, u32 *corrected, u32 *uncorrected, u32 *pending,
                                           u32 *failure)
{
    PASS(gpu);
    *corrected = (u32)number_of("rows.corr", gpu, 0);
    *uncorrected = (u32)number_of("rows.unc", gpu, 0);
    *pending = (u32)number_of("rows.pending", gpu, 0);
    *failure = (u32)number_of("rows.failure", gpu, 0);
    return SUCCESS;
}

/* Events */

typedef struct {
    nvmlDevice_t gpu;
    u64 type, data;
    u32 gpu_instance, compute_instance;
} nvmlEventData_t;

API nvmlReturn_t nvmlEventSetCreate(void **set)
{
    static int only;

    PASS(NULL);
    *set = &only;
    return SUCCESS;
}

API nvmlReturn_t nvmlEventSetFree(void *set)
{
    (void)set;
    return SUCCESS;
}

API nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t gpu, u64 types, void *set)
{
    (void)types;
    (void)set;
    PASS(gpu);
    gpu->watched = 1;
    gpu->last_xid = number_of("xid", gpu, 0);
    return SUCCESS;
}

API nvmlReturn_t nvmlEventSetWait_v2(void *set, nvmlEventData_t *event, u32 timeout_ms)
{
    (void)set;
    (void)timeout_ms;
    PASS(NULL);
    for (u32 i = 0; i < GPUS; i++) {
        u64 xid = number_of("xid", &gpus[i], 0);

        if (gpus[i].watched && xid && xid != gpus[i].last_xid) {
            gpus[i].last_xid = xid;
            memset(event, 0, sizeof *event);
            event->gpu = &gpus[i];
            event->type = 8; /* nvmlEventTypeXidCriticalError */
            event->data = xid;
            return SUCCESS;
        }
    }
    return TIMEOUT;
}
