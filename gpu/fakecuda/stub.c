/* libcuda.so.1 without a driver: every entry point is looked up through a hook set from Python.

   cuda.bindings asks cuGetProcAddress for each function once and keeps the pointer, so the hook's
   answers must stay callable for the life of the process. Invariant: without a hook every function
   is "not found" (500). */
#include <stddef.h>

typedef int (*hook_t)(const char *name, void **fn);
static hook_t hook;

/* Also the mark by which a probe knows that this is no driver. */
void rota_fakecuda_set_hook(hook_t h) { hook = h; }

int cuGetProcAddress_v2(const char *name, void **fn, int version, unsigned long long flags,
                        int *status) {
  (void)version;
  (void)flags;
  *fn = NULL;
  const int result = hook ? hook(name, fn) : 500;
  if (status) *status = result ? 1 : 0;
  return result;
}

int cuGetProcAddress(const char *name, void **fn, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(name, fn, version, flags, NULL);
}
