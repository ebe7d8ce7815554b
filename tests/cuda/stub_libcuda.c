/* A driver with two devices, sm_60 and sm_75, that computes nothing and notes every call. */
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char calls[1 << 20];
static size_t length;
static char failing[64];
static int failure, capturing, params_size;
static uintptr_t current_context;

static void note(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  length += vsnprintf(calls + length, sizeof calls - length, format, arguments);
  va_end(arguments);
}

static int result(const char* name) { return strcmp(failing, name) == 0 ? failure : 0; }

/* For tests: the calls since the last time, one a line; the call that fails from now on. */
const char* stub_calls(void) {
  static char copy[sizeof calls];
  memcpy(copy, calls, length + 1);
  length = 0;
  calls[0] = 0;
  return copy;
}
void stub_fail(const char* name, int code) {
  snprintf(failing, sizeof failing, "%s", name);
  failure = code;
}
void stub_set_capturing(int value) { capturing = value; }
void stub_set_params_size(int value) { params_size = value; }
void stub_set_context(uintptr_t value) { current_context = value; }
uintptr_t stub_context(void) { return current_context; }

int cuInit(unsigned flags) {
  note("cuInit %u\n", flags);
  return getenv("STUB_CUDA_NO_DEVICE") ? 100 : 0;
}
int cuDriverGetVersion(int* version) {
  *version = 12090;
  return 0;
}
int cuGetErrorString(int code, const char** text) {
  *text = code == 2 ? "out of memory" : code == 100 ? "no CUDA-capable device is detected" : NULL;
  return *text ? 0 : 1;
}
int cuDeviceGetCount(int* count) {
  *count = 2;
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  switch (attribute) {
    case 8: *value = 48 << 10; return 0;
    case 75: *value = device == 0 ? 6 : 7; return 0;
    case 76: *value = device == 0 ? 0 : 5; return 0;
    case 97: *value = (device == 0 ? 48 : 64) << 10; return 0;
  }
  return 1;
}
int cuDevicePrimaryCtxRetain(uintptr_t* context, int device) {
  note("cuDevicePrimaryCtxRetain device=%d\n", device);
  *context = 0xc0 + device;
  return 0;
}
int cuCtxGetCurrent(uintptr_t* context) {
  *context = current_context;
  return 0;
}
int cuCtxPushCurrent_v2(uintptr_t context) {
  note("push %lx\n", (unsigned long)context);
  current_context = context;
  return 0;
}
int cuCtxPopCurrent_v2(uintptr_t* context) {
  *context = current_context;
  note("pop\n");
  current_context = 0;
  return 0;
}
int cuStreamIsCapturing(uintptr_t stream, int* status) {
  (void)stream;
  *status = capturing;
  return 0;
}
int cuLibraryLoadData(uintptr_t* library, const void* image, void* a, void* b, unsigned c, void* d,
                      void* e, unsigned f) {
  (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
  const unsigned char* bytes = image;
  uint32_t flags;
  if (memcmp(bytes, "\177ELF", 4) != 0) return 200;
  memcpy(&flags, bytes + 48, sizeof flags);
  note("cuLibraryLoadData sm_%u\n", flags & 0xff);
  static uintptr_t last = 0x1000;
  *library = ++last;
  return result("cuLibraryLoadData");
}
int cuLibraryGetKernel(uintptr_t* kernel, uintptr_t library, const char* name) {
  note("cuLibraryGetKernel %s\n", name);
  *kernel = library + 0x1000;
  return result("cuLibraryGetKernel");
}
int cuKernelGetFunction(uintptr_t* function, uintptr_t kernel) {
  note("cuKernelGetFunction context=%lx\n", (unsigned long)current_context);
  *function = (kernel << 8) + current_context;
  return result("cuKernelGetFunction");
}
int cuFuncSetAttribute(uintptr_t function, int attribute, int value) {
  (void)function;
  note("cuFuncSetAttribute %d=%d\n", attribute, value);
  return result("cuFuncSetAttribute");
}
int cuLaunchKernel(uintptr_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                   unsigned by, unsigned bz, unsigned shared, uintptr_t stream, void** params,
                   void** extra) {
  (void)function;
  note("cuLaunchKernel grid=%u,%u,%u block=%u,%u,%u shared=%u stream=%lx context=%lx extra=%d "
       "params=",
       gx, gy, gz, bx, by, bz, shared, (unsigned long)stream, (unsigned long)current_context,
       extra != NULL);
  for (int i = 0; i < params_size; ++i) note("%02x", ((unsigned char*)params[0])[i]);
  note("\n");
  return result("cuLaunchKernel");
}
