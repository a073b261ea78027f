// SPDX-License-Identifier: Apache-2.0
//! Shared words whose orders come from the table, and plain memory whose races loom reports.

use std::cell::Cell;
use std::sync::OnceLock;

use loom::cell::UnsafeCell;
use loom::sync::atomic::{fence, AtomicUsize, Ordering};
use loom::sync::Mutex;

use crate::table::{weaker, Order, ROWS};

static CHOSEN: OnceLock<(String, Option<String>)> = OnceLock::new();

/// Chooses the check, and the access that gets an order that is too weak.
pub fn choose(check: &str, mutant: Option<&str>) {
    CHOSEN.set((check.to_string(), mutant.map(str::to_string))).unwrap();
}

fn order(access: &str) -> Order {
    let (check, mutant) = CHOSEN.get().unwrap();
    let row = ROWS.iter().find(|r| r.check == check && r.access == access);
    let needs = row.unwrap_or_else(|| panic!("no row {check} {access} in the table")).needs;
    if mutant.as_deref() == Some(access) {
        weaker(needs).expect("an order that can be weaker")
    } else {
        needs
    }
}

loom::thread_local! {
    /// The thread has stored with SeqCst and has not passed a fence since.
    static STORED: Cell<bool> = Cell::new(false);
}

// loom takes SeqCst accesses for AcqRel, but has SeqCst fences. A sequentially consistent store that is followed by such
// a load of the same thread has a fence between the two here. Neither alone has one.
fn stored() {
    STORED.with(|s| s.set(true));
}

fn loads() {
    if STORED.with(|s| s.replace(false)) {
        fence(Ordering::SeqCst);
    }
}

/// A word that processes access atomically.
pub struct Word(AtomicUsize);

impl Word {
    pub fn new(v: usize) -> Word {
        Word(AtomicUsize::new(v))
    }

    pub fn load(&self, access: &str) -> usize {
        match order(access) {
            Order::SeqCst => {
                loads();
                self.0.load(Ordering::Acquire)
            }
            Order::Relaxed | Order::Release => self.0.load(Ordering::Relaxed),
            _ => self.0.load(Ordering::Acquire),
        }
    }

    pub fn store(&self, access: &str, v: usize) {
        match order(access) {
            Order::SeqCst => {
                self.0.store(v, Ordering::Release);
                stored();
            }
            Order::Relaxed | Order::Acquire => self.0.store(v, Ordering::Relaxed),
            _ => self.0.store(v, Ordering::Release),
        }
    }

    pub fn swap(&self, access: &str, v: usize) {
        self.change(access, |o| self.0.swap(v, o));
    }

    pub fn add(&self, access: &str, v: usize) {
        self.change(access, |o| self.0.fetch_add(v, o));
    }

    /// Compare-and-swap: whether the word was old.
    pub fn cas(&self, access: &str, old: usize, v: usize) -> bool {
        self.change(access, |o| self.0.compare_exchange(old, v, o, Ordering::Relaxed)).is_ok()
    }

    fn change<T>(&self, access: &str, f: impl Fn(Ordering) -> T) -> T {
        match order(access) {
            Order::Relaxed => f(Ordering::Relaxed),
            Order::Acquire => f(Ordering::Acquire),
            Order::Release => f(Ordering::Release),
            Order::AcqRel => f(Ordering::AcqRel),
            Order::SeqCst => {
                loads();
                let r = f(Ordering::AcqRel);
                stored();
                r
            }
        }
    }
}

/// Memory that is read and written without atomics: tensors, entries, mails.
pub struct Plain(UnsafeCell<usize>);

unsafe impl Sync for Plain {}

impl Plain {
    pub fn new(v: usize) -> Plain {
        Plain(UnsafeCell::new(v))
    }

    pub fn read(&self) -> usize {
        self.0.with(|p| unsafe { *p })
    }

    pub fn write(&self, v: usize) {
        self.0.with_mut(|p| unsafe { *p = v });
    }
}

/// The kernel's queue of one futex word. Its lock orders a wait and a wake; the comparison itself is relaxed.
pub struct Futex(Mutex<bool>);

impl Futex {
    pub fn new() -> Futex {
        Futex(Mutex::new(false))
    }

    /// Sleeps, as far as this run goes, unless the word has changed.
    pub fn wait(&self, word: &Word, seen: usize) {
        let mut sleeps = self.0.lock().unwrap();
        *sleeps = word.0.load(Ordering::Relaxed) == seen;
    }

    pub fn wake(&self) {
        *self.0.lock().unwrap() = false;
    }

    pub fn sleeps(&self) -> bool {
        *self.0.lock().unwrap()
    }
}
