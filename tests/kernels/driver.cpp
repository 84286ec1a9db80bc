// A CUDA driver without a GPU: each call has its real signature, is checked as the driver would check it, and is written down.
//
// Handles are numbers above 2^32, so that one cut to an int is none. Contexts and capture modes are a thread's.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <vector>

enum { OK = 0, INVALID_VALUE = 1, INVALID_CONTEXT = 201, INVALID_HANDLE = 400 };
enum { MAX_DYNAMIC_SHARED = 8, EXEC_TIMEOUT = 17, SHARED_OF_MULTIPROCESSOR = 81 };

typedef uint64_t Handle;
struct Function {
  std::string name;
  Handle context;
  std::map<int, int> attributes;
};

static const Handle CONTEXTS = 0x71'0000'0000, MODULES = 0x72'0000'0000, FUNCTIONS = 0x73'0000'0000;
static thread_local std::vector<Handle> current;
static thread_local int capture_mode = 0;   // global, as in a thread that has asked for nothing
static std::map<Handle, Handle> modules;    // and the context that each was loaded into
static std::map<Handle, Function> functions;
static std::string log, answer, argument;
static std::map<std::string, int> failing;
static std::string faulting;   // the kernel that breaks the context, and with which code
static int fault = 0, lasting = 0, is_blocking = 0;
static int shared_of_multiprocessor = 65536, argument_bytes = 0;

template <class... Values> static int note(int code, const char *name, const char *format, Values... values) {
  char text[512];
  snprintf(text, sizeof text, format, values...);
  if (!code && failing.count(name)) code = failing[name], failing.erase(name);
  log += std::string(name) + (*text ? " " : "") + text + (code ? " = " + std::to_string(code) : "") + "\n";
  return code;
}

#define CALL extern "C" int

// ---- For the test
extern "C" const char *told() { return answer = log, log.clear(), answer.c_str(); }
extern "C" const char *last_argument() { return argument.data(); }
extern "C" void expect(int bytes, int shared) { argument_bytes = bytes, shared_of_multiprocessor = shared; }
extern "C" void fail_once(const char *name, int code) { failing[name] = code; }
extern "C" void fault_in(const char *kernel, int code, int blocking) {   // blocking: as CUDA_LAUNCH_BLOCKING=1 says
  faulting = kernel, fault = code, is_blocking = blocking, lasting = 0;
}
extern "C" void set_thread(Handle context, int mode) {   // 0: no context
  current.assign(context ? 1 : 0, context), capture_mode = mode;
}
extern "C" Handle context_of_thread() { return current.empty() ? 0 : current.size() > 1 ? 1 : current.back(); }
extern "C" int mode_of_thread() { return capture_mode; }

// ---- The driver's
CALL cuDriverGetVersion(int *version) { return *version = 13020, OK; }
CALL cuGetErrorName(int code, const char **name) { return *name = code == INVALID_VALUE ? "INVALID_VALUE" : code == 700 ? "ILLEGAL_ADDRESS" : "SOME_ERROR", OK; }
CALL cuGetErrorString(int, const char **text) { return *text = "said by the driver", OK; }
CALL cuDeviceGet(int *device, int ordinal) { return *device = ordinal + 1000, note(OK, "cuDeviceGet", "%d", ordinal); }
CALL cuDevicePrimaryCtxRetain(Handle *context, int device) {
  *context = CONTEXTS + device;
  return note(device >= 999 ? OK : INVALID_VALUE, "cuDevicePrimaryCtxRetain", "%d", device);
}
CALL cuCtxPushCurrent_v2(Handle context) { return current.push_back(context), note(OK, "cuCtxPushCurrent", "%d", int(context - CONTEXTS)); }
CALL cuCtxPopCurrent_v2(Handle *context) {
  if (current.empty()) return note(INVALID_CONTEXT, "cuCtxPopCurrent", "");
  *context = current.back();
  return current.pop_back(), note(OK, "cuCtxPopCurrent", "");
}
CALL cuCtxSetCurrent(Handle context) { return current.assign(1, context), note(OK, "cuCtxSetCurrent", "%d", int(context - CONTEXTS)); }
CALL cuDeviceGetAttribute(int *value, int attribute, int device) {
  if (attribute == EXEC_TIMEOUT) return *value = device % 2, OK;   // GPU 1 has a display
  *value = shared_of_multiprocessor;
  return attribute == SHARED_OF_MULTIPROCESSOR && device >= 999 ? OK : INVALID_VALUE;
}
CALL cuThreadExchangeStreamCaptureMode(int *mode) {
  std::swap(*mode, capture_mode);
  return note(OK, "cuThreadExchangeStreamCaptureMode", "%d", capture_mode);
}
CALL cuModuleLoadData(Handle *module, const char *image) {
  if (current.empty()) return note(INVALID_CONTEXT, "cuModuleLoadData", "");
  *module = MODULES + modules.size();
  modules[*module] = current.back();
  return note(OK, "cuModuleLoadData", "%s", image);
}
CALL cuModuleGetFunction(Handle *function, Handle module, const char *name) {
  if (!modules.count(module)) return note(INVALID_HANDLE, "cuModuleGetFunction", "%s", name);
  *function = FUNCTIONS + functions.size();
  functions[*function] = {name, modules[module], {}};
  return note(OK, "cuModuleGetFunction", "%s", name);
}
CALL cuFuncSetAttribute(Handle function, int attribute, int value) {
  const bool known = functions.count(function);
  if (known) functions[function].attributes[attribute] = value;
  return note(known ? OK : INVALID_HANDLE, "cuFuncSetAttribute", "%d %d", attribute, value);
}
CALL cuLaunchKernel(Handle function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y, unsigned threads_z,
                    unsigned shared, Handle stream, void **arguments, void **extra) {
  int code = OK;
  if (!functions.count(function)) return note(INVALID_HANDLE, "cuLaunchKernel", "");
  Function &f = functions[function];
  if (current.empty() || current.back() != f.context) code = INVALID_CONTEXT;
  else if (!x || x > 0x7fffffff || y != 1 || z != 1 || !threads || threads > 1024 || threads_y != 1 || threads_z != 1) code = INVALID_VALUE;
  else if (shared > 49152 && (int)shared > f.attributes[MAX_DYNAMIC_SHARED]) code = INVALID_VALUE;
  else if (!arguments || !arguments[0] || extra) code = INVALID_VALUE;
  else argument.assign((const char *)arguments[0], argument_bytes);
  if (!code) code = lasting;
  if (!code && f.name == faulting) lasting = fault, code = is_blocking ? fault : OK;
  return note(code, "cuLaunchKernel", "%s blocks %u threads %u shared %u stream %llu", f.name.c_str(), x, threads, shared, (unsigned long long)stream);
}
CALL cuStreamSynchronize(Handle stream) { return note(current.empty() ? INVALID_CONTEXT : lasting, "cuStreamSynchronize", "%llu", (unsigned long long)stream); }
