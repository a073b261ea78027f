// SPDX-License-Identifier: Apache-2.0
//! A client in Rust, bound to the C library by hand: only what it uses.
//!
//!     make -C cbindings install PREFIX=$HOME/.local
//!     rustc -O -o ask examples/rust/client.rs -L $HOME/.local/lib -l ringbatch -C link-arg=-Wl,-rpath,$HOME/.local/lib
//!     ./ask echo        # a model that returns its one f32 input
//!
//! The structs are those of cbindings/ringbatch.h, field by field.

use std::ffi::{c_char, c_int, c_void, CStr, CString};
use std::{env, process, ptr, slice};

type Client = u64;

const RB_F32: u32 = 9; // of enum rb_dtype

#[repr(C)]
struct Request {
    id: u64,
    base: *mut u8,
    slot: u32,
    rows: u32,
    attachment: u32,
}

#[repr(C)]
struct View {
    data: *mut c_void,
    bytes: u64,
    stride: u64,
    dtype: u32,
    rank: u32,
    shape: [u64; 9],
}

extern "C" {
    fn rb_connect(model: *const c_char, options: *const c_void, client: *mut Client) -> c_int;
    fn rb_claim(client: Client, rows: u32, dims: *const u32, ndims: u32, timeout: i64, request: *mut Request) -> c_int;
    fn rb_input(client: Client, request: u64, k: u32, view: *mut View) -> c_int;
    fn rb_output(client: Client, request: u64, k: u32, view: *mut View) -> c_int;
    fn rb_commit(client: Client, request: u64, timeout: i64, flags: u32) -> c_int;
    fn rb_wait(client: Client, request: u64, timeout: i64) -> c_int;
    fn rb_release(client: Client, request: u64) -> c_int;
    fn rb_close(client: Client) -> c_int;
    fn rb_error() -> *const c_char;
}

/// A status of the library as a Result, with its text.
fn check(status: c_int) -> Result<(), String> {
    if status == 0 {
        return Ok(());
    }
    // rb_error is valid until this thread's next call that fails.
    Err(unsafe { CStr::from_ptr(rb_error()) }.to_string_lossy().into_owned())
}

impl View {
    fn new() -> View {
        View { data: ptr::null_mut(), bytes: 0, stride: 0, dtype: 0, rank: 0, shape: [0; 9] }
    }

    /// The elements, in the slot itself; until the request is released. Other types are refused.
    unsafe fn floats(&mut self) -> Result<&mut [f32], String> {
        if self.dtype != RB_F32 {
            return Err(format!("the tensor's type is {}, not f32", self.dtype));
        }
        Ok(slice::from_raw_parts_mut(self.data as *mut f32, self.bytes as usize / 4))
    }
}

fn run(model: &str) -> Result<(), String> {
    let name = CString::new(model).map_err(|e| e.to_string())?;
    let mut client: Client = 0;
    unsafe {
        check(rb_connect(name.as_ptr(), ptr::null(), &mut client))?;
        for n in 0..1000 {
            let mut request = Request { id: 0, base: ptr::null_mut(), slot: 0, rows: 0, attachment: 0 };
            let (mut x, mut y) = (View::new(), View::new());
            check(rb_claim(client, 1, ptr::null(), 0, -1, &mut request))?;
            check(rb_input(client, request.id, 0, &mut x))?;
            x.floats()?.fill(n as f32);
            check(rb_commit(client, request.id, 0, 0))?;
            check(rb_wait(client, request.id, -1))?;
            check(rb_output(client, request.id, 0, &mut y))?;
            let got = y.floats()?[0];
            if got != n as f32 {
                return Err(format!("sent {}, got {}", n, got));
            }
            check(rb_release(client, request.id))?;
        }
        check(rb_close(client))
    }
}

fn main() {
    let model = env::args().nth(1).unwrap_or_else(|| "echo".into());
    if let Err(e) = run(&model) {
        eprintln!("{}", e);
        process::exit(1);
    }
    println!("ok");
}
