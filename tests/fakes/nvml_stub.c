/* A libnvidia-ml.so.1 that answers from the text file $NVML_STUB, read at every call:
 *
 *     count 2
 *     gpu 0 total=25769803776 used=1073741824 util=25
 *     gpu 1 total=8589934592 used=0 mig=1
 *     gpu 1 bus=7             its place on the PCI bus; without it the index + 1
 *     gpu 1 error=15          every call on this GPU fails with that code (15: GPU is lost)
 *     init error=9            nvmlInit fails (9: driver not loaded)
 *     gpu 1 ecc=3             uncorrected memory errors since its reset; without it ECC is not supported
 *     gpu 1 pending=1         a row is to be remapped; failed=1: it could not be. Without either: not supported
 *     gpu 1 pages=1           a page is to be retired; without it not supported
 *     gpu 1 xid=79 nth=2      an XID is told once to who waits; `nth` makes it another one
 *     gpu 1 events=0          it tells of no events
 *     gpu 1 odd=999           what is asked of its memory's faults fails with that code
 *     hang 1                  nvmlDeviceGetCount never returns
 *     deaf 1                  nvmlEventSetWait_v2 never returns
 *     driver 2                another driver than at nvmlInit: every call fails until it is made again
 *     driver 2 count=1        the same, but for nvmlDeviceGetCount
 *
 * Codes and structures are those of nvml.h.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int Status;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned int gpu, memory; } Utilization;
typedef struct { unsigned int index; } *Device;

static unsigned int indices[16];

/* The value of `key` in lines that begin with `prefix`, or `otherwise`. The last one counts. */
static long long look(const char *prefix, const char *key, long long otherwise) {
    char line[256], *found;
    FILE *file = fopen(getenv("NVML_STUB"), "r");
    if (!file) return otherwise;
    while (fgets(line, sizeof line, file))
        if (!strncmp(line, prefix, strlen(prefix)) && (found = strstr(line, key)))
            otherwise = atoll(found + strlen(key));
    fclose(file);
    return otherwise;
}

static long long of(Device device, const char *key, long long otherwise) {
    char prefix[16];
    snprintf(prefix, sizeof prefix, "gpu %u ", *(unsigned int *)device);
    return look(prefix, key, otherwise);
}

static long long driver = -1; /* that of the last nvmlInit; none is open while it is negative */

/* 1: not initialised; 999: unknown error, what is left of a driver that was loaded again. */
static Status session(void) { return driver < 0 ? 1 : driver == look("driver", " ", 0) ? 0 : 999; }

static Status status(Device device) {
    Status closed = session();
    return closed ? closed : (Status)of(device, "error=", 0);
}

Status nvmlInitWithFlags(unsigned int flags) {
    Status error = (Status)look("init", "error=", 0);
    if (!error) driver = look("driver", " ", 0);
    return error;
}
Status nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
Status nvmlShutdown(void) { driver = -1; return 0; }
const char *nvmlErrorString(Status code) { return code == 15 ? "GPU is lost" : "stub error"; }

Status nvmlDeviceGetCount_v2(unsigned int *count) {
    while (look("hang", " ", 0)) sleep(1);
    *count = (unsigned int)look("count", " ", 0);
    return look("driver", "count=", 0) ? 0 : session();
}

Status nvmlDeviceGetHandleByIndex_v2(unsigned int index, Device *device) {
    indices[index] = index;
    *device = (Device)&indices[index];
    return status(*device);
}

Status nvmlDeviceGetUUID(Device device, char *uuid, unsigned int length) {
    snprintf(uuid, length, "GPU-stub-%u", *(unsigned int *)device);
    return status(device);
}

Status nvmlDeviceGetName(Device device, char *name, unsigned int length) {
    snprintf(name, length, "Stub %u", *(unsigned int *)device);
    return status(device);
}

Status nvmlDeviceGetMemoryInfo(Device device, Memory *memory) {
    memory->total = (unsigned long long)of(device, "total=", 0);
    memory->used = (unsigned long long)of(device, "used=", 0);
    memory->free = memory->total - memory->used;
    return status(device);
}

/* nvmlPciInfo_t, of which only the bus id is looked at. */
typedef struct {
    char legacy[16];
    unsigned int domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} Pci;

Status nvmlDeviceGetPciInfo_v3(Device device, Pci *pci) {
    memset(pci, 0, sizeof *pci);
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02llX:00.0",
             of(device, "bus=", 1 + *(unsigned int *)device));
    return status(device);
}

Status nvmlDeviceGetMigMode(Device device, unsigned int *current, unsigned int *pending) {
    long long mode = of(device, "mig=", -1);
    *current = *pending = (unsigned int)mode;
    return mode < 0 ? 3 : status(device); /* 3: not supported, as on GPUs without MIG */
}

Status nvmlDeviceGetUtilizationRates(Device device, Utilization *rates) {
    long long util = of(device, "util=", -1);
    rates->gpu = (unsigned int)util;
    return util < 0 ? 3 : status(device);
}

/* 3: not supported, as on consumer cards; `odd`: a code of its own. */
static Status fact(Device device, long long value) {
    Status odd = (Status)of(device, "odd=", 0);
    return odd ? odd : value < 0 ? 3 : status(device);
}

Status nvmlDeviceGetTotalEccErrors(Device device, int type, int counter, unsigned long long *count) {
    long long errors = of(device, "ecc=", -1);
    if (type != 1 || counter != 0) return 2; /* 2: invalid argument; uncorrected ones since the reset */
    *count = (unsigned long long)errors;
    return fact(device, errors);
}

Status nvmlDeviceGetRemappedRows(Device device, unsigned int *corrected, unsigned int *uncorrected,
                                 unsigned int *pending, unsigned int *failed) {
    long long is_pending = of(device, "pending=", -1), has_failed = of(device, "failed=", -1);
    *corrected = 5;
    *uncorrected = 1;
    *pending = is_pending > 0;
    *failed = has_failed > 0;
    return fact(device, is_pending > has_failed ? is_pending : has_failed);
}

Status nvmlDeviceGetRetiredPagesPendingStatus(Device device, int *pending) {
    long long pages = of(device, "pages=", -1);
    *pending = pages > 0;
    return fact(device, pages);
}

/* Of one event set at a time, which is all that anybody needs. */
typedef struct {
    Device device;
    unsigned long long type, data;
    unsigned int gpu_instance, compute_instance;
} Event;

static int is_registered[16];
static long long told[16];

Status nvmlEventSetCreate(void **set) {
    memset(is_registered, 0, sizeof is_registered);
    *set = is_registered;
    return session();
}

Status nvmlEventSetFree(void *set) { (void)set; return 0; }

Status nvmlDeviceGetSupportedEventTypes(Device device, unsigned long long *types) {
    *types = (unsigned long long)of(device, "events=", 1 | 2 | 8);
    return status(device);
}

Status nvmlDeviceRegisterEvents(Device device, unsigned long long types, void *set) {
    (void)set;
    if (types != 8) return 2;
    is_registered[*(unsigned int *)device] = 1;
    return status(device);
}

Status nvmlEventSetWait_v2(void *set, Event *event, unsigned int timeout_ms) {
    (void)set;
    for (unsigned int waited = 0; waited <= timeout_ms; waited += 20) {
        while (look("deaf", " ", 0)) sleep(1);
        if (session()) return session();
        for (unsigned int index = 0; index < 16; index++) {
            Device device = (Device)&indices[index];
            long long xid, nth;
            if (of(device, "error=", 0) == 15) is_registered[index] = 0; /* lost is lost */
            if (!is_registered[index] || (xid = of(device, "xid=", 0)) == 0) continue;
            nth = 1000 * of(device, "nth=", 1) + xid;
            if (told[index] == nth) continue;
            told[index] = nth;
            memset(event, 0, sizeof *event);
            event->device = device;
            event->type = 8;
            event->data = (unsigned long long)xid;
            return 0;
        }
        usleep(20000);
    }
    return 10; /* 10: timeout */
}
