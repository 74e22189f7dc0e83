/* libcuda.so.1 without a driver: what torch and Triton call of it. Triton launches its kernels here. */
#define SUCCESS(name) int name() { return 0; }

long cu_launches;
void cu_reset(void) { cu_launches = 0; }
int cuLaunchKernel() { return cu_launches++, 0; }
int cuLaunchKernelEx() { return cu_launches++, 0; }

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case 75: *value = 9; break;      /* compute capability, major */
    case 76: *value = 0; break;      /* and minor */
    case 16: *value = 132; break;    /* multiprocessors */
    case 97: *value = 232448; break; /* shared memory of a block, opted in */
    case 8: *value = 49152; break;   /* shared memory of a block */
    case 10: *value = 32; break;     /* warp size */
    case 82: *value = 65536; break;  /* registers of a multiprocessor */
    case 13:
    case 36: *value = 1980000; break; /* clock rates, kHz */
    case 37: *value = 6144; break;    /* width of the memory bus */
    case 39: *value = 2048; break;    /* threads of a multiprocessor */
    default: *value = 1;
    }
    return 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = attribute == 0 ? 1024 : 0; return 0; }
int cuCtxGetCurrent(void **context) { *context = (void *)16; return 0; }
int cuDeviceGet(int *device, int number) { *device = 0; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    if (flags) *flags = 0;
    *active = 1;
    return 0;
}
int cuModuleLoad(void **module) { *module = (void *)16; return 0; }
int cuModuleLoadData(void **module) { *module = (void *)16; return 0; }
int cuModuleGetFunction(void **function) { *function = (void *)16; return 0; }
SUCCESS(cuInit)
SUCCESS(cuCtxGetLimit)
SUCCESS(cuCtxSetCurrent)
SUCCESS(cuCtxSetLimit)
SUCCESS(cuDevicePrimaryCtxRetain)
SUCCESS(cuFuncSetAttribute)
SUCCESS(cuFuncSetCacheConfig)
SUCCESS(cuGetErrorString)
SUCCESS(cuLaunchCooperativeKernel)
SUCCESS(cuLinkAddData_v2)
SUCCESS(cuLinkComplete)
SUCCESS(cuLinkCreate_v2)
SUCCESS(cuMemcpyDtoHAsync_v2)
SUCCESS(cuModuleLoadDataEx)
SUCCESS(cuModuleUnload)
SUCCESS(cuOccupancyMaxActiveBlocksPerMultiprocessor)
SUCCESS(cuOccupancyMaxActiveClusters)
SUCCESS(cuPointerGetAttribute)
SUCCESS(cuTensorMapEncodeTiled)
