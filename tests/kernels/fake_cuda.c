/* A CUDA driver that is none: so much of libcuda as kernels/ calls, for a
 * machine without a GPU. It is loaded by cuda-bindings as the real one would
 * be, so what is tested with it is our use of the bindings and of the API, the
 * structures that cross over included. What it is not: proof of anything that a
 * device does.
 *
 * It keeps the API's rules, and refuses what breaks them:
 *   - a condition belongs to the graph it was created for, and to one node of it;
 *   - a body, and a child in it, hold kernels and children, no conditions;
 *   - a graph with a condition is instantiated once, and is nobody's child;
 *   - dependencies are nodes of the same graph.
 * And it is as unkind as the API allows: of the nodes whose turn it is, the last
 * added runs first, and a condition that nobody has set yet is true.
 *
 * A "device" function is dw_set_condition, known by its name, or a function of
 * this process (fake_graph). Its memory is this process's, with DEVICE_OFFSET
 * between the two, so that mixing their addresses up is a crash.
 *
 * FAKE_CUDA, from the environment, names what it cannot do: "no-init", "no-map",
 * "no-context", "no-register" or "old".
 */
#include <cuda.h>
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT        __attribute__((visibility("default")))
#define MAX_NODES     16
#define MAX_STEPS     1000
#define DEVICE_OFFSET ((uint64_t)1 << 56)

typedef void (*host_function)(void);

typedef struct condition {
    struct CUgraph_st *graph;
    bool has_node;
    unsigned value;
    unsigned default_value;
    bool is_reset; /* to the default, at each launch */
} condition;

struct CUgraphNode_st {
    CUgraphNodeType type;
    struct CUgraph_st *graph; /* that it is a node of */
    CUgraphNode after[MAX_NODES];
    size_t num_after;
    host_function function; /* of a kernel; NULL: set the condition */
    condition *condition;
    const uint32_t *go;
    struct CUgraph_st *inner; /* a child, or the body */
};

struct CUgraph_st {
    struct CUgraphNode_st nodes[MAX_NODES];
    size_t num_nodes;
    bool is_body;
    bool has_condition;
    bool was_instantiated;
};

/* All that is open, which must be nothing in the end. */
static int num_open;
static uint64_t registered[8];
static char set_condition[] = "dw_set_condition";

static bool lacks(const char *what)
{
    const char *given = getenv("FAKE_CUDA");
    return given && !strcmp(given, what);
}

EXPORT int fake_num_open(void)
{
    return num_open;
}

/* A graph of one kernel, which is a function of this process. */
EXPORT CUgraph fake_graph(host_function function)
{
    CUgraph graph = calloc(1, sizeof *graph);
    graph->nodes[0] = (struct CUgraphNode_st){.type = CU_GRAPH_NODE_TYPE_KERNEL,
                                              .graph = graph,
                                              .function = function};
    graph->num_nodes = 1;
    return graph;
}

EXPORT CUresult cuInit(unsigned flags)
{
    (void)flags;
    return lacks("no-init") ? CUDA_ERROR_NO_DEVICE : CUDA_SUCCESS;
}

EXPORT CUresult cuDriverGetVersion(int *version)
{
    *version = lacks("old") ? 12030 : 13000;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuCtxGetCurrent(CUcontext *context)
{
    *context = lacks("no-context") ? NULL : (CUcontext)&num_open;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute,
                                     CUdevice device)
{
    if (device)
        return CUDA_ERROR_INVALID_DEVICE;
    *value = !(attribute == CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY &&
               lacks("no-map"));
    return CUDA_SUCCESS;
}

static uint64_t *find_registered(uint64_t address)
{
    for (size_t i = 0; i < sizeof registered / sizeof *registered; i++)
        if (registered[i] == address)
            return &registered[i];
    return NULL;
}

EXPORT CUresult cuMemHostRegister(void *memory, size_t size, unsigned flags)
{
    uint64_t address = (uint64_t)memory;
    if (lacks("no-register"))
        return CUDA_ERROR_NOT_SUPPORTED;
    if (address % 4096 || size % 4096 ||
        flags != (CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP))
        return CUDA_ERROR_INVALID_VALUE;
    if (find_registered(address))
        return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    *find_registered(0) = address;
    num_open++;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostGetDevicePointer(CUdeviceptr *device, void *memory,
                                          unsigned flags)
{
    (void)flags;
    if (!find_registered((uint64_t)memory))
        return CUDA_ERROR_INVALID_VALUE;
    *device = (uint64_t)memory + DEVICE_OFFSET;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuMemHostUnregister(void *memory)
{
    uint64_t *found = find_registered((uint64_t)memory);
    if (!found)
        return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    *found = 0;
    num_open--;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    if (!strstr(image, "cudaGraphSetConditional"))
        return CUDA_ERROR_INVALID_PTX;
    *module = (CUmodule)strdup(image);
    num_open++;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleUnload(CUmodule module)
{
    free(module);
    num_open--;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module,
                                    const char *name)
{
    char entry[100];
    snprintf(entry, sizeof entry, ".entry %s(", name);
    if (!strstr((const char *)module, entry) || strcmp(name, set_condition))
        return CUDA_ERROR_NOT_FOUND;
    *function = (CUfunction)set_condition;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphCreate(CUgraph *graph, unsigned flags)
{
    (void)flags;
    *graph = calloc(1, sizeof **graph);
    num_open++;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphDestroy(CUgraph graph)
{
    if (graph->is_body)
        return CUDA_ERROR_INVALID_VALUE;
    free(graph);
    num_open--;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphConditionalHandleCreate(CUgraphConditionalHandle *handle,
                                               CUgraph graph, CUcontext context,
                                               unsigned default_value,
                                               unsigned flags)
{
    if (context != (CUcontext)&num_open)
        return CUDA_ERROR_INVALID_CONTEXT;
    condition *made = calloc(1, sizeof *made);
    made->graph = graph;
    made->default_value = default_value;
    made->is_reset = flags & CU_GRAPH_COND_ASSIGN_DEFAULT;
    made->value = 1;
    *handle = (uint64_t)made;
    return CUDA_SUCCESS;
}

static CUgraphNode add(CUgraph graph, CUgraphNodeType type,
                       const CUgraphNode *after, size_t num_after)
{
    for (size_t i = 0; i < num_after; i++)
        if (after[i]->graph != graph)
            return NULL;
    CUgraphNode node = &graph->nodes[graph->num_nodes++];
    *node = (struct CUgraphNode_st){.type = type, .graph = graph};
    memcpy(node->after, after, num_after * sizeof *after);
    node->num_after = num_after;
    return node;
}

EXPORT CUresult cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph,
                                         const CUgraphNode *after,
                                         size_t num_after, CUgraph child)
{
    if (child->has_condition)
        return CUDA_ERROR_NOT_SUPPORTED;
    *node = add(graph, CU_GRAPH_NODE_TYPE_GRAPH, after, num_after);
    if (!*node)
        return CUDA_ERROR_INVALID_VALUE;
    (*node)->inner = child;
    return CUDA_SUCCESS;
}

static CUresult add_kernel(CUgraphNode *node, CUgraph graph,
                           const CUgraphNode *after, size_t num_after,
                           const CUDA_KERNEL_NODE_PARAMS_v3 *params)
{
    if (params->func != (CUfunction)set_condition || params->gridDimX != 1 ||
        params->blockDimX != 1 || !params->kernelParams)
        return CUDA_ERROR_INVALID_VALUE;
    *node = add(graph, CU_GRAPH_NODE_TYPE_KERNEL, after, num_after);
    if (!*node)
        return CUDA_ERROR_INVALID_VALUE;
    (*node)->condition = *(condition **)params->kernelParams[0];
    (*node)->go = *(const uint32_t **)params->kernelParams[1];
    return CUDA_SUCCESS;
}

static CUresult add_conditional(CUgraphNode *node, CUgraph graph,
                                const CUgraphNode *after, size_t num_after,
                                CUDA_CONDITIONAL_NODE_PARAMS *params)
{
    condition *given = (condition *)params->handle;
    if (graph->is_body)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (params->type != CU_GRAPH_COND_TYPE_WHILE || params->size != 1 ||
        params->ctx != (CUcontext)&num_open || given->graph != graph ||
        given->has_node)
        return CUDA_ERROR_INVALID_VALUE;
    *node = add(graph, CU_GRAPH_NODE_TYPE_CONDITIONAL, after, num_after);
    if (!*node)
        return CUDA_ERROR_INVALID_VALUE;
    given->has_node = true;
    graph->has_condition = true;
    (*node)->condition = given;
    (*node)->inner = calloc(1, sizeof *graph);
    (*node)->inner->is_body = true;
    /* As the API has it: the caller's structure is where bodies are told. */
    params->phGraph_out = &(*node)->inner;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph,
                                  const CUgraphNode *after,
                                  const CUgraphEdgeData *edges,
                                  size_t num_after, CUgraphNodeParams *params)
{
    if (edges)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (params->type == CU_GRAPH_NODE_TYPE_KERNEL)
        return add_kernel(node, graph, after, num_after, &params->kernel);
    if (params->type == CU_GRAPH_NODE_TYPE_CONDITIONAL)
        return add_conditional(node, graph, after, num_after,
                               &params->conditional);
    return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph,
                                            unsigned long long flags)
{
    (void)flags;
    if (graph->has_condition && graph->was_instantiated)
        return CUDA_ERROR_NOT_SUPPORTED;
    graph->was_instantiated = true;
    *exec = (CUgraphExec)graph;
    num_open++;
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec)
{
    (void)exec;
    num_open--;
    return CUDA_SUCCESS;
}

static bool is_due(const struct CUgraphNode_st *node, const bool *done)
{
    for (size_t i = 0; i < node->num_after; i++)
        if (!done[node->after[i] - node->graph->nodes])
            return false;
    return true;
}

static CUresult run(CUgraph graph);

static CUresult run_node(struct CUgraphNode_st *node)
{
    if (node->type == CU_GRAPH_NODE_TYPE_GRAPH)
        return run(node->inner);
    if (node->type == CU_GRAPH_NODE_TYPE_KERNEL) {
        if (node->function)
            node->function();
        else
            node->condition->value = *node->go;
        return CUDA_SUCCESS;
    }
    if (node->condition->is_reset)
        node->condition->value = node->condition->default_value;
    for (int steps = 0; node->condition->value; steps++) {
        if (steps == MAX_STEPS)
            return CUDA_ERROR_LAUNCH_TIMEOUT;
        CUresult rc = run(node->inner);
        if (rc)
            return rc;
    }
    return CUDA_SUCCESS;
}

static CUresult run(CUgraph graph)
{
    bool done[MAX_NODES] = {false};
    for (size_t num_done = 0; num_done < graph->num_nodes; num_done++) {
        size_t i = graph->num_nodes;
        while (done[--i] || !is_due(&graph->nodes[i], done))
            ;
        CUresult rc = run_node(&graph->nodes[i]);
        if (rc)
            return rc;
        done[i] = true;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGraphLaunch(CUgraphExec exec, CUstream stream)
{
    (void)stream;
    return run((CUgraph)exec);
}

/* How the bindings find all others; the newest form of a name comes first. */
EXPORT CUresult cuGetProcAddress_v2(const char *name, void **function,
                                    int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult *status)
{
    (void)version;
    (void)flags;
    char newer[200];
    snprintf(newer, sizeof newer, "%s_v2", name);
    void *self = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    *function = dlsym(self, newer);
    if (!*function)
        *function = dlsym(self, name);
    if (status)
        *status = *function ? CU_GET_PROC_ADDRESS_SUCCESS
                            : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
