/* A stand-in for the driver's libnvidia-ml.so.1, so that the real nvidia-ml-py can be driven without a GPU.
   Its GPUs are set up by fake_set and fake_uuid; fake_fail makes a function return an error.
   -DDRIVER=450 and so on leaves out what drivers before a version did not have. */
#include <stdio.h>
#include <string.h>
#include <time.h>

#ifndef DRIVER
#define DRIVER 580
#endif

typedef int R;
enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SIZE = 7, LOST = 15, VERSION = 25 };
enum { INIT, UUID, PCI, MIG_MODE, CLOCK, POWER, ENERGY, GPM_SUPPORT, GPM_SAMPLE, GPM_METRICS, FUNCTIONS };
enum { HAS_GPM, TENSOR, SM, DRAM, SM_CLOCK, MILLIWATTS, MILLIJOULES, IS_LOST, IS_DIVIDED, HAS_METRICS, VALUES };

struct device { int index, is_instance, instance_id; struct device *gpu; char uuid[96], pci[32]; double values[VALUES]; };
struct sample { int filled, device, instance; struct timespec at; };
struct metric { unsigned id; R status; double value; struct { char *a, *b, *c; } info; };
struct metrics { unsigned version, count; struct sample *first, *second; struct metric metrics[]; };

static struct device gpus[16], instances[16];
static int gpu_count, instance_count, inits, sample_count;
static int failures[FUNCTIONS], calls[FUNCTIONS];

/* What the tests set. */
void fake_reset(void) {
    memset(gpus, 0, sizeof gpus); memset(instances, 0, sizeof instances);
    memset(failures, 0, sizeof failures); memset(calls, 0, sizeof calls);
    gpu_count = instance_count = inits = sample_count = 0;
}
int fake_gpu(const char *uuid, const char *pci) {
    struct device *d = &gpus[gpu_count];
    d->index = gpu_count; d->gpu = d;
    snprintf(d->uuid, sizeof d->uuid, "%s", uuid); snprintf(d->pci, sizeof d->pci, "%s", pci);
    return gpu_count++;
}
void fake_instance(int gpu, int id, const char *uuid) {
    struct device *d = &instances[instance_count++];
    d->index = gpu; d->is_instance = 1; d->instance_id = id; d->gpu = &gpus[gpu];
    snprintf(d->uuid, sizeof d->uuid, "%s", uuid);
}
void fake_set(int gpu, int what, double value) { gpus[gpu].values[what] = value; }
void fake_instance_set(int place, int what, double value) { instances[place].values[what] = value; }
void fake_fail(int function, int error) { failures[function] = error; }
int fake_calls(int function) { return calls[function]; }
int fake_inits(void) { return inits; }
int fake_samples(void) { return sample_count; }

static R start(int function, struct device *d) {
    calls[function]++;
    if (function != INIT && !inits) return UNINITIALIZED;
    if (d && d->gpu->values[IS_LOST]) return LOST;
    return failures[function];
}
#define START(function, device) do { R r = start(function, device); if (r) return r; } while (0)

R nvmlInitWithFlags(unsigned flags) { START(INIT, NULL); inits++; return OK; }
R nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
R nvmlShutdown(void) { if (!inits) return UNINITIALIZED; inits--; return OK; }
const char *nvmlErrorString(R r) {
    return r == NOT_SUPPORTED ? "Not Supported" : r == LOST ? "GPU is lost" : r == VERSION ? "Argument Version Mismatch" : "an error";
}
R nvmlDeviceGetCount_v2(unsigned *count) { *count = gpu_count; return inits ? OK : UNINITIALIZED; }
R nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **d) {
    if ((int)index >= gpu_count) return INVALID;
    *d = &gpus[index]; return OK;
}
R nvmlDeviceGetHandleByUUID(const char *uuid, struct device **d) {
    START(UUID, NULL);
    for (int i = 0; i < gpu_count; i++) if (!strcmp(gpus[i].uuid, uuid)) { *d = &gpus[i]; return OK; }
    for (int i = 0; i < instance_count; i++) if (!strcmp(instances[i].uuid, uuid)) { *d = &instances[i]; return OK; }
    return NOT_FOUND;
}
R nvmlDeviceGetHandleByPciBusId_v2(const char *pci, struct device **d) {
    START(PCI, NULL);
    unsigned a[3], b[3];
    if (sscanf(pci, "%x:%x:%x", a, a + 1, a + 2) != 3) return INVALID;
    for (int i = 0; i < gpu_count; i++)
        if (sscanf(gpus[i].pci, "%x:%x:%x", b, b + 1, b + 2) == 3 && !memcmp(a, b, sizeof a)) { *d = &gpus[i]; return OK; }
    return NOT_FOUND;
}
R nvmlDeviceGetUUID(struct device *d, char *text, unsigned size) { snprintf(text, size, "%s", d->uuid); return OK; }
#if DRIVER >= 450
R nvmlDeviceIsMigDeviceHandle(struct device *d, unsigned *is) { *is = d->is_instance; return OK; }
R nvmlDeviceGetMigMode(struct device *d, unsigned *now, unsigned *next) {
    START(MIG_MODE, d); *now = *next = d->values[IS_DIVIDED] != 0; return OK;
}
R nvmlDeviceGetMaxMigDeviceCount(struct device *d, unsigned *count) { *count = 7; return OK; }
R nvmlDeviceGetMigDeviceHandleByIndex(struct device *d, unsigned index, struct device **found) {
    for (int i = 0; i < instance_count; i++)
        if (instances[i].gpu == d && !index--) { *found = &instances[i]; return OK; }
    return NOT_FOUND;
}
R nvmlDeviceGetDeviceHandleFromMigDeviceHandle(struct device *d, struct device **gpu) { *gpu = d->gpu; return OK; }
R nvmlDeviceGetGpuInstanceId(struct device *d, unsigned *id) { *id = d->instance_id; return d->is_instance ? OK : INVALID; }
#endif

R nvmlDeviceGetClockInfo(struct device *d, unsigned type, unsigned *mhz) {
    START(CLOCK, d); if (d->is_instance || type != 1) return INVALID; *mhz = d->values[SM_CLOCK]; return OK;
}
R nvmlDeviceGetPowerUsage(struct device *d, unsigned *mw) { START(POWER, d); *mw = d->values[MILLIWATTS]; return OK; }
#if DRIVER >= 384
R nvmlDeviceGetTotalEnergyConsumption(struct device *d, unsigned long long *mj) {
    START(ENERGY, d); *mj = d->values[MILLIJOULES]; return OK;
}
#endif
#if DRIVER >= 525
#include <stdlib.h>
struct support { unsigned version, supported; };
R nvmlGpmQueryDeviceSupport(struct device *d, struct support *s) {
    START(GPM_SUPPORT, d);
    if (s->version != 1) return VERSION;
    s->supported = d->values[HAS_GPM] != 0; return OK;
}
R nvmlGpmSampleAlloc(struct sample **s) { *s = calloc(1, sizeof **s); sample_count++; return OK; }
R nvmlGpmSampleFree(struct sample *s) { free(s); sample_count--; return OK; }
static R fill(struct device *d, int instance, struct sample *s) {
    START(GPM_SAMPLE, d);
    if (!d->values[HAS_GPM]) return NOT_SUPPORTED;
    s->filled = 1; s->device = d->index; s->instance = instance; clock_gettime(CLOCK_MONOTONIC, &s->at); return OK;
}
R nvmlGpmSampleGet(struct device *d, struct sample *s) { return d->is_instance ? INVALID : fill(d, -1, s); }
R nvmlGpmMigSampleGet(struct device *d, unsigned instance, struct sample *s) { return d->is_instance ? INVALID : fill(d, instance, s); }
static struct device *sampled(struct sample *s) {
    for (int i = 0; i < instance_count; i++)
        if (instances[i].index == s->device && instances[i].instance_id == s->instance) return &instances[i];
    return &gpus[s->device];
}
/* Like the driver, it refuses what it cannot compute: an empty sample, samples of two devices, and a later one first. */
R nvmlGpmMetricsGet(struct metrics *m) {
    START(GPM_METRICS, NULL);
    struct sample *a = m->first, *b = m->second;
    if (m->version != 1) return VERSION;
    if (!a || !b || !a->filled || !b->filled || a->device != b->device || a->instance != b->instance) return INVALID;
    double seconds = b->at.tv_sec - a->at.tv_sec + (b->at.tv_nsec - a->at.tv_nsec) / 1e9;
    if (seconds < 0.09) return INVALID;
    struct device *d = sampled(a);
    for (unsigned i = 0; i < m->count; i++) {
        struct metric *x = &m->metrics[i];
        x->status = OK;
        switch (x->id) {
        case 2: x->value = d->values[SM]; break;
        case 5: x->value = d->values[TENSOR]; break;
        case 10: x->value = d->values[DRAM]; break;
        default: x->status = NOT_SUPPORTED;
        }
    }
    return OK;
}
#endif
