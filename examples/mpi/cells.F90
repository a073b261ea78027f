! SPDX-License-Identifier: Apache-2.0
! cells.c in Fortran, without the exact solution: ranks of a reaction and diffusion, whose reaction is a request.
!
!   mpifort -O2 -DUSE_MPI -o cells $(pkg-config --variable=includedir ringbatch)/ringbatch.f90 cells.F90 $(pkg-config --libs ringbatch)
!   mpirun -n 8 ./cells 200
program cells
  use ringbatch
  use, intrinsic :: iso_fortran_env, only: real32, int64
#ifdef USE_MPI
  use mpi_f08
#endif
  implicit none
  integer, parameter :: n = 64
  integer(int64), parameter :: most = 60000000000_int64 ! no wait without an end: a job that hangs costs its allocation
  type(ringbatch_client) :: surrogate
  real(real32) :: x(2, 0:n + 1), y(2, n), total
  integer :: rank = 0, ranks = 1, steps = 200, step, i, status
  character(20) :: argument
  call get_command_argument(1, argument)
  if (argument /= '') read (argument, *) steps
#ifdef USE_MPI
  call mpi_init()
  call mpi_comm_rank(mpi_comm_world, rank)
  call mpi_comm_size(mpi_comm_world, ranks)
#endif
  call ringbatch_connect(surrogate, 'mlp', status, wait=.true., window=n, patience=most) ! a row for each cell
  if (status /= ringbatch_ok) call fail('the surrogate')
  x(1, :) = [(1 + 0.5*sin(0.1*(rank*n + i)), i=0, n + 1)]
  x(2, :) = 3
  do step = 1, steps
    call ringbatch_infer(surrogate, n, [ringbatch_array(x(:, 1:n))], [ringbatch_array(y)], status, timeout=most)
    if (status /= ringbatch_ok) call fail('no answer')
    x(:, 1:n) = x(:, 1:n) + y
    call exchange()
    x(:, 1:n) = x(:, 1:n) + 0.1*(x(:, 0:n - 1) - 2*x(:, 1:n) + x(:, 2:n + 1))
  end do
  call ringbatch_close(surrogate)
  total = sum(x(1, 1:n))
#ifdef USE_MPI
  call mpi_allreduce(mpi_in_place, total, 1, mpi_real, mpi_sum, mpi_comm_world)
  call mpi_finalize()
#endif
  if (rank == 0) print '(a, i0, a, i0, a, f7.4)', 'ranks ', ranks, '  steps ', steps, '  mean u ', total/(n*ranks)
contains
  subroutine exchange() ! the neighbours' outer cells
#ifdef USE_MPI
    integer :: left, right
    left = modulo(rank - 1, ranks)
    right = modulo(rank + 1, ranks)
    call mpi_sendrecv(x(:, 1), 2, mpi_real, left, 0, x(:, n + 1), 2, mpi_real, right, 0, mpi_comm_world, mpi_status_ignore)
    call mpi_sendrecv(x(:, n), 2, mpi_real, right, 1, x(:, 0), 2, mpi_real, left, 1, mpi_comm_world, mpi_status_ignore)
#else
    x(:, 0) = x(:, n)
    x(:, n + 1) = x(:, 1)
#endif
  end subroutine
  subroutine fail(what)
    character(*), intent(in) :: what
    print *, what, ': ', ringbatch_error()
#ifdef USE_MPI
    call mpi_abort(mpi_comm_world, 1)
#endif
    stop 1
  end subroutine
end program
