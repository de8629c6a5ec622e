"""The one thing that Triton cannot say: a kernel that sets a graph's condition.

Written out as PTX, which a driver compiles at load for whatever device there is, so that nobody
needs CUDA to build or to install this package. ``cudaGraphSetConditional`` stays undefined in it;
the driver binds the name when it loads the module.

Source: CUDA programming guide, "Conditional Graph Nodes"; PTX ISA 7.0.
"""

__all__ = ["SET_CONDITION_NAME", "SET_CONDITION_PTX"]

SET_CONDITION_NAME = "dw_set_condition"

#: dw_set_condition(handle: u64, go: u64 address of a 32-bit word), a single thread.
SET_CONDITION_PTX = f"""\
.version 7.0
.target sm_70
.address_size 64
.extern .func cudaGraphSetConditional(.param .b64 handle, .param .b32 value);
.visible .entry {SET_CONDITION_NAME}(.param .u64 handle, .param .u64 go)
{{
    .reg .b64 %handle, %go;
    .reg .b32 %value;
    ld.param.u64 %handle, [handle];
    ld.param.u64 %go, [go];
    cvta.to.global.u64 %go, %go;
    ld.global.u32 %value, [%go];
    {{
        .param .b64 first;
        .param .b32 second;
        st.param.b64 [first], %handle;
        st.param.b32 [second], %value;
        call.uni cudaGraphSetConditional, (first, second);
    }}
    ret;
}}
"""
